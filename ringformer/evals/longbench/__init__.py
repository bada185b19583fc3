"""`ringformer eval longbench`: the tasks of LongBench, from its official files."""
