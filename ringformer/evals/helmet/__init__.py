"""`ringformer eval helmet`: the tasks of HELMET that no model judges, from its official files."""
