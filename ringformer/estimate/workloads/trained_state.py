"""A workload with what the flags of `estimate` and `plan` say of its state, and these flags again."""

import argparse
from dataclasses import replace
from typing import Any

from ringformer.estimate.workloads.command_tools import given
from ringformer.estimate.workloads.training import STATE_KEYS, Workload, state_settings
from ringformer.parallel.lora import NO_ADAPTERS
from ringformer.runs.config import check_trained_dtype


def with_state(workload: Workload, args: argparse.Namespace) -> Workload:
    """Return the workload with what the flags say. Raises ValueError if they contradict each other."""
    changed: dict[str, dict[str, Any]] = {"optimizer": {}, "lora": {}}
    for flag, value in given(args, STATE_KEYS).items():
        part, name = STATE_KEYS[flag]
        changed[part][name] = value
    offload = getattr(args, "optimizer_offload", None)  # a plan has no such flag: it chooses
    if offload is not None:
        changed["optimizer"]["offload"] = offload
    optimizer = replace(workload.optimizer, **changed["optimizer"])
    lora = replace(workload.lora, **changed["lora"])
    if lora != NO_ADAPTERS:
        lora.check()
    check_trained_dtype(optimizer, lora)
    return replace(workload, optimizer=optimizer, lora=lora)


def state_keys(workload: Workload) -> list[str]:
    """Return the keys of a config that differ from the defaults, as KEY=VALUE."""
    return [f"{'.'.join(STATE_KEYS[flag])}={value}" for flag, value in state_settings(workload).items()]
