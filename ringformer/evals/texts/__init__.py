"""A text of the public domain, in which evaluations hide their needles, and words of their own."""
