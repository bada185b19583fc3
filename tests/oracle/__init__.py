"""What a step and a run should compute, in float64 and without a line of the package: a LLaMA, AdamW, packing."""
