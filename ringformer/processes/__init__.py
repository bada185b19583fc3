"""The processes of a run: how they meet, agree, hear signals, notice stalls and lost peers, and lock a folder."""
