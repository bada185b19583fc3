"""RULER: its thirteen tasks, their prompts and their data."""
