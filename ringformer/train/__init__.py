"""Training: preparation of a run, train step, loop, evaluation, stages, and the command `ringformer train`."""
