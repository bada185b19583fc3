"""Packing of streams, whole documents or mixtures into sequences, as functions of seed and index."""
