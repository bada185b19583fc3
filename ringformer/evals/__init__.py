"""Evaluations of long context: line retrieval, needles, RULER, and perplexity by position."""
