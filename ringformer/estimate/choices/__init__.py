"""Choices for a workload: meshes, memory settings, and their candidates."""
