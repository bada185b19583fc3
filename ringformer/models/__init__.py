"""Models: LLaMA in Flax NNX, and the interface by which training and estimates use any family."""
