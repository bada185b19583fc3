"""Training: what a run is prepared of, the train step, the loop, evaluation, stages, and the command."""
