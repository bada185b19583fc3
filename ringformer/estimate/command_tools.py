"""Flags, exit code and progress lines of the estimating commands."""

import sys

DOES_NOT_FIT = 3
"""Exit code of `--require_fit` when something does not fit."""


MODEL_FLAGS = (
    "attention",
    "layout",
    "compute_dtype",
    "remat",
    "remat_group",
    "head_groups",
    "q_chunk",
    "k_chunk",
    "offload",
    "fetch_ahead",
    "kernel",
)
"""The fields of `LlamaConfig` that are flags of an estimate."""


def log(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)
