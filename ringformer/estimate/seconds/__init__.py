"""Seconds of a compiled program: cycles, bytes and FLOPs of its instructions, and what its transfers travel under."""
