"""Seconds of a compiled program, from the cycles, bytes and FLOPs of its instructions and from the transfers that they
hide."""
