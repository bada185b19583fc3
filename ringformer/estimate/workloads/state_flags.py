"""Flags of `estimate` and `plan` that say what a run trains and keeps between steps."""

import argparse
from dataclasses import dataclass, replace
from typing import Any, Literal

from ringformer.estimate.workloads.command_tools import given
from ringformer.estimate.workloads.training import STATE_KEYS, Workload, state_settings
from ringformer.parallel.lora import NO_ADAPTERS
from ringformer.runs.config import OptimizerName, check_trained_dtype


@dataclass
class StateFlags:
    """Flags of what a run trains, and of the optimizer's state."""

    optimizer: OptimizerName | None = None
    """adamw (default of a preset), lion or adafactor"""
    params_dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of the weights between steps: float32 (default of a preset) or bfloat16"""
    moment_dtype: str | None = None
    """dtype of the optimizer's moments: float32 (default of a preset), bfloat16, or first,second"""
    lora_rank: int | None = None
    """rank of adapters that train instead of the weights (default of a preset: 0, all weights train)"""
    lora_base_dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of the frozen weights under adapters (default of a preset: float32)"""


def with_state(workload: Workload, args: argparse.Namespace) -> Workload:
    """Return the workload with what the flags say. Raises ValueError if they contradict each other."""
    changed: dict[str, dict[str, Any]] = {"optimizer": {}, "lora": {}}
    for flag, value in given(args, STATE_KEYS).items():
        part, name = STATE_KEYS[flag]
        changed[part][name] = value
    optimizer = replace(workload.optimizer, **changed["optimizer"])
    lora = replace(workload.lora, **changed["lora"])
    if lora != NO_ADAPTERS:
        lora.check()
    check_trained_dtype(optimizer, lora)
    return replace(workload, optimizer=optimizer, lora=lora)


def state_keys(workload: Workload) -> list[str]:
    """Return the keys of a config that differ from the defaults, as KEY=VALUE."""
    return [f"{'.'.join(STATE_KEYS[flag])}={value}" for flag, value in state_settings(workload).items()]
