"""Closed forms of memory, FLOPs, bytes and seconds, without a compiler."""
