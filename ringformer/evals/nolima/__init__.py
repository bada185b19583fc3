"""`ringformer eval nolima`: needles that share no word with the question."""
