"""Choices of a run's optimizer, for configs and for commands whose help imports nothing else."""

from typing import Literal

OptimizerName = Literal["adamw", "lion", "adafactor"]

Offload = Literal["none", "moments", "state", "all"]
"""Parts of a run's state that can lie in the host's memory, each with those before it."""

ParamsDtype = Literal["float32", "bfloat16"]
"""Dtypes of weights between steps."""

ReduceDtype = Literal["float32", "bfloat16"]
"""Dtypes in which copies of the model send gradients to each other."""
