"""Kernels compiled alone: their cycles, their use of a core, and the fastest chunks (`ringformer tune`)."""
