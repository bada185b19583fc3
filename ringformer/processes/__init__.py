"""Processes of a run: how they meet, agree, handle signals, detect stalls and lost peers, and lock the run's folder."""
