"""Kernels compiled alone: their cycles, what they spend them on, and the fastest chunks (`ringformer tune`)."""
