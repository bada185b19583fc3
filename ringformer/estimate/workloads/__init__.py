"""Workloads that are estimated: models on a mesh of a target, and the programs that they run."""
