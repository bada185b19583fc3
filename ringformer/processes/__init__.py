"""Processes of a run: they meet, agree, handle signals, detect stalls and lost peers, and lock a folder."""
