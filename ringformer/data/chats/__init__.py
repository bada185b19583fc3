"""Conversations: cleaning of their records, and chat templates, which run in a separate process with limits."""
