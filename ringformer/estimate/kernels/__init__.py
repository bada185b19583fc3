"""Kernels that are compiled alone: their cycles, their use of a core, and their fastest chunks (`ringformer tune`)."""
