"""Flags, exit code and progress lines of the estimating commands."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any

DOES_NOT_FIT = 3
"""Exit code of `--require_fit` when something does not fit."""


MODEL_FLAGS = (
    "attention",
    "layout",
    "ulysses",
    "ring",
    "window",
    "compute_dtype",
    "remat",
    "remat_group",
    "full_remat_layers",
    "head_groups",
    "q_chunk",
    "k_chunk",
    "offload",
    "fetch_ahead",
    "kernel",
)
"""The fields of `DecoderConfig` that are flags of an estimate."""


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the flags `names` that the command line sets."""
    values = {}
    for name in names:
        value = getattr(args, name)
        if value is not None:
            values[name] = value
    return values


def log(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)
