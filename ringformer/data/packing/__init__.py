"""Packing: sequences as a function of seed and number, from streams, whole documents or mixtures."""
