"""Compiled programs in tests: collectives by count, and the markers of what needs the TPU or the GPU compiler."""

import platform
import sys
from collections import Counter
from typing import NamedTuple

import pytest

from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.workloads.targets import MissingCompiler, find_target


class Collective(NamedTuple):
    """A kind of collective; its array is what one device sends of a permute, or receives of a gather."""

    kind: str
    asynchronous: bool
    dtype: str
    shape: tuple[int, ...]


on_tpu = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="libtpu exists for Linux on x86-64 only"
)


def _has_cuda_compiler() -> bool:
    try:
        return find_target("8xA100-80").require_compiler() != ""
    except MissingCompiler:
        return False


on_cuda = pytest.mark.skipif(not _has_cuda_compiler(), reason="the CUDA wheels take gigabytes")


def executed_collectives(program: Program | str) -> dict[Collective, float]:
    """Count the executions of each collective in one run of a compiled program, given itself or its text."""
    program = Program.parse(program) if isinstance(program, str) else program
    counts: dict[Collective, float] = Counter()
    for name, times in program.executed.items():
        for instruction in program.computations[name].values():
            if kind := instruction.collective:
                array = instruction.arrays[0]
                counts[Collective(kind, instruction.opcode.endswith("-start"), *array)] += times
    return counts
