"""Perplexity of a token store's documents: by context and position, with a sliding window, and LongPPL."""
