"""Models: LLaMA in Flax NNX, and the interface through which training and estimates use any family of models."""
