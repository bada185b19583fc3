"""The cache of keys and values, and attention to it: of a chunk of new tokens, and of one new token of each row."""
