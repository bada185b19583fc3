"""Conversations: records cleaned and rendered by chat templates, in a process with limits."""
