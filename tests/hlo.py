"""Compiled programs in tests: collectives by count, and the marker of what needs the TPU compiler."""

import platform
import sys

import pytest

from ringformer.estimate.compiled_program import Collective, Program

__all__ = ["Collective", "executed_collectives", "on_tpu"]

on_tpu = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="libtpu exists for Linux on x86-64 only"
)


def executed_collectives(text: str) -> dict[Collective, int]:
    """How often one run of a compiled program's text executes each collective."""
    return Program.parse(text).executed_collectives()
