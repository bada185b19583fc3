"""Searches for settings and meshes: the fastest for a context (`ringformer plan`), the longest context that fits."""
