"""Texts that compilers write: the text of a program, the buffers at its peak, and the files of a dump."""
