"""Flags of `estimate` and `plan` that say what a run trains, and keeps between steps. Importing them loads no JAX."""

from dataclasses import dataclass
from typing import Literal

from ringformer.runs.choices import OptimizerName, ParamsDtype, ReduceDtype


@dataclass
class StateFlags:
    """Flags of what a run trains, and of the optimizer's state."""

    optimizer: OptimizerName | None = None
    """adamw (default of a preset), lion or adafactor"""
    params_dtype: ParamsDtype | None = None
    """dtype of the weights between steps: float32 (default of a preset) or bfloat16"""
    moment_dtype: str | None = None
    """dtype of the optimizer's moments: float32 (default of a preset), bfloat16, or first,second"""
    reduce_dtype: ReduceDtype | None = None
    """dtype in which copies of the model (dp) sum up gradients: float32 (default of a preset) or bfloat16"""
    lora_rank: int | None = None
    """rank of adapters that train instead of the weights (default of a preset: 0, all weights train)"""
    lora_base_dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of the frozen weights under adapters (default of a preset: float32)"""
