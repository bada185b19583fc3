"""Training: preparation of a run, the train step, the loop, evaluation, stages, and the command."""
