"""Compiled programs in tests: collectives by count, and the markers of what needs the TPU or the GPU compiler."""

import platform
import sys

import pytest

from ringformer.estimate.compiler.program_text import Collective, Program
from ringformer.estimate.targets import MissingCompiler, find_target

__all__ = ["Collective", "executed_collectives", "on_cuda", "on_tpu"]

on_tpu = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="libtpu exists for Linux on x86-64 only"
)


def _has_cuda_compiler() -> bool:
    try:
        return find_target("8xA100-80").require_compiler() != ""
    except MissingCompiler:
        return False


on_cuda = pytest.mark.skipif(not _has_cuda_compiler(), reason="the CUDA wheels take gigabytes")


def executed_collectives(text: str) -> dict[Collective, int]:
    """How often one run of a compiled program's text executes each collective."""
    return Program.parse(text).executed_collectives()
