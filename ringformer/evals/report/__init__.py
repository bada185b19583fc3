"""`ringformer eval report`: one table of all evaluations that a model has."""
