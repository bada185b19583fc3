"""Conversations: cleaning of records, and chat templates, which run in a process with limits."""
