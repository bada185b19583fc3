"""Compilation in a separate process, and readers of the compiler's dumps: instructions, buffers, collectives."""
