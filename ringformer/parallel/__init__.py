"""The device mesh and its device order, shardings of weights, and compiler options of each platform."""
