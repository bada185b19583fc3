"""The compiler in a separate process, and readers of its dumps: instructions, buffers, collectives."""
