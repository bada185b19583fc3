"""The compiler in a process of its own, and what its dumps say of a program: instructions, buffers, collectives."""
