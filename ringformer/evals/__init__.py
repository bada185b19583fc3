"""Evaluations of long context: line retrieval, needles, RULER, perplexity by position."""
