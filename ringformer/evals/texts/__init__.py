"""A text of the public domain, in which evaluations hide their needles."""
