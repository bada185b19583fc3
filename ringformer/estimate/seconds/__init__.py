"""Seconds of a compiled program: cycles, bytes and FLOPs of its instructions, and the transfers that they hide."""
