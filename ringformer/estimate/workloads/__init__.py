"""What is estimated: a model on a mesh of a target, and the programs that it runs."""
