"""Seconds of a compiled program on one device, from bytes, FLOPs and, where known, the cycles of machine code.

Each execution of an instruction takes the longer of two times: its cycles at the chip's clock, and its HBM bytes at the
memory's rate. (Data are fetched while the units compute.) Without machine code, FLOPs at a share of the peak replace
the cycles. Communication is not included; the schedule shows how much of it is exposed (`overlap.py`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ringformer.estimate.compiled.program_text import Instruction, Program
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.memory_traffic import hbm_bytes
from ringformer.hardware import CHIPS
from ringformer.inference.cache.token_attention import ATTEND_TOKEN
from ringformer.ops.kernels.chunk_sizes import tuned_share
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.ops.ring_passes import LOOP

ATTENTION = "attention"
COPIES = "copies and layout changes"
OTHER = "other"
CACHED = "attention to the cache"
SCOPES = {
    "attention": "projections",
    "feed_forward": "feed-forward",
    "loss": "loss",
    "embedding": "embedding",
    "optimizer": "optimizer",
}
"""Purposes in a report, by the `jax.named_scope` of the model or the train step. The purpose for attention excludes its
chunk pairs."""


class Efficiency(NamedTuple):
    """Shares of the peak that replace the cycles of matrix products without machine code."""

    pairs: float = 0.55
    """Share for the products of chunk pairs. It is chosen so that attention takes the same time as by its machine code,
    exponentials included."""
    products: float = 0.85
    """Share for all other products."""
    pairs_of: str = ""
    """Source of `pairs`; empty: XLA's code."""

    def __str__(self) -> str:
        whose = self.pairs_of and f" ({self.pairs_of})"
        return f"FLOPs at {self.pairs:.0%} of the peak in attention{whose}, {self.products:.0%} elsewhere"


USUAL = Efficiency()
"""Shares that match the machine code of v5e. They are used for every generation whose own machine code was not read
completely."""

_EFFICIENCY = {
    "v4": Efficiency(0.27, 0.70),
    "v5p": Efficiency(0.55, 0.82),
    "v6e": Efficiency(0.12, 0.63),
    "tpu7x": Efficiency(0.12, 0.63),
}
"""Shares that match the machine code of whole 7B steps (results/part_cycles.json). For tpu7x, `pairs` comes from the
machine code of attention alone, and the rest from v6e, whose matrix units have the same size."""


_CUDNN = 0.61, "cuDNN's by NVIDIA's table of H200"
"""Share of the peak, and its source: causal bfloat16 attention over 16K tokens, 64 heads of 128 features, 8 key heads.
This attention reaches 673 TFLOP/s forward and 579 backward; the peak is 989."""

_PALLAS = "the kernels' by their machine code"


def efficiency(generation: str, kernel: str = "xla", head_dim: int = LANES) -> Efficiency:
    """Return the shares for a generation (a key of CHIPS), for the kernel that computes attention's blocks
    (`ops/kernels/block_kernels.py`), and for heads of `head_dim` features. On TPU, a product over a number of features
    that is not a multiple of 128 takes as long as a product over the next multiple."""
    own = _EFFICIENCY.get(generation, USUAL)
    chip = CHIPS.get(generation)
    if kernel == "cudnn":
        return own._replace(pairs=_CUDNN[0], pairs_of=_CUDNN[1])
    if kernel == "pallas" and (share := tuned_share(generation, head_dim)):
        return own._replace(pairs=share, pairs_of=_PALLAS)
    padded = -(-head_dim // LANES) * LANES if chip and chip.tensor_cores else head_dim
    return own._replace(pairs=own.pairs * head_dim / padded)


class Rates(NamedTuple):
    """Rates of a device, per second."""

    flops: float
    """Peak FLOPs of matrix products in the program's dtype."""
    network: Network
    """Links between the devices."""
    hbm_bytes: float
    cycles: float
    """Cycles of the clock; 0 if machine code is not counted (GPU)."""
    efficiency: Efficiency = USUAL
    host_bytes: float = math.inf
    """Bytes between a device and its host, one way."""


class Seconds(NamedTuple):
    """Seconds of instructions if data are fetched while the units compute, with lower and upper bounds."""

    busy: float = 0.0
    """Seconds that the units compute: cycles, or FLOPs at an efficiency."""
    memory: float = 0.0
    """Seconds of HBM bytes."""
    overlapped: float = 0.0
    """Estimate: for each instruction, the larger of `busy` and `memory`."""
    floor: float = 0.0
    """Lower bound (roofline): for each instruction, the larger of FLOPs at the peak and HBM bytes at the memory's
    rate."""
    counted: float = 0.0
    """Part of the estimate that is based on machine code, or on bytes that take at least as long as the modelled
    computation."""
    certain: float = 0.0
    """Part of the estimate that is spent regardless of which branches are taken."""

    def __add__(self, other: Any) -> "Seconds":
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> "Seconds":
        return Seconds(*(x * count for x in self))


@dataclass(frozen=True)
class ProgramSeconds:
    """Seconds of every instruction of a program, including everything it calls."""

    program: Program
    rates: Rates
    cycles: Mapping[str, float] = field(default_factory=dict)
    """Cycles of known machine code, by `KernelKeys.key`."""
    _computations: dict[str, dict[str, Seconds]] = field(default_factory=dict, init=False)

    @cached_property
    def _keys(self) -> KernelKeys:
        return KernelKeys(self.program)

    @property
    def purposes(self) -> dict[str, Seconds]:
        """Seconds of one run of the whole program, by purpose (`purpose`)."""
        return self.of_computation(self.program.entry)

    def of_computation(self, name: str) -> dict[str, Seconds]:
        """Return the seconds of one run of a computation, but at least the seconds of all its HBM bytes, asynchronous
        copies included."""
        if name not in self._computations:
            sums: dict[str, Seconds] = {}
            for instruction in self.program.computations[name].values():
                _add(sums, self.of_instruction(name, instruction))
            waiting = sum(s.memory for s in sums.values()) - _overlapped(sums)
            if waiting > 0:
                _add(sums, {COPIES: Seconds(overlapped=waiting, floor=waiting, counted=waiting)})
            self._computations[name] = sums
        return self._computations[name]

    def of_instruction(self, computation: str, instruction: Instruction) -> dict[str, Seconds]:
        """Return the seconds of one run of an instruction. A conditional counts as its slowest branch, because the ring
        waits for its busiest rank."""
        if instruction.opcode == "while":
            trips = self.program.trip_count(computation, instruction)
            sums: dict[str, Seconds] = {}
            for inner, seconds in self.of_computation(instruction.called[0]).items():
                name = inner
                # GPU compilers merge equal computations: names inside come from one of the loops that call it
                if of_chunk_pairs(instruction) and inner.startswith(ATTENTION):
                    name = purpose(instruction)
                _add(sums, {name: seconds.times(trips)})
            return sums
        if instruction.opcode == "conditional":
            branches = list(map(self.of_computation, instruction.called))
            slowest = max(branches, key=_overlapped)
            sums = {name: seconds._replace(certain=0.0) for name, seconds in slowest.items()}
            _add(sums, {OTHER: Seconds(certain=min(map(certain_seconds, branches)))})
            return sums
        if instruction.opcode == "call" and not instruction.collective:
            return self.of_computation(instruction.called[0])
        seconds = self._alone(computation, instruction)
        if instruction.opcode == "fusion" and not instruction.op_name:
            instruction = self.program.root(instruction.called[0])
        if not any(seconds):
            return {}
        return {purpose(instruction): seconds}

    def _alone(self, computation: str, instruction: Instruction) -> Seconds:
        flops = self.program.instruction_flops(computation, instruction)
        rates = self.rates
        memory = hbm_bytes(self.program, computation, instruction) / rates.hbm_bytes
        if instruction.opcode.endswith("-start"):  # overlaps with what follows; of_computation counts its bytes
            return Seconds(memory=memory)
        share = rates.efficiency.pairs if of_chunk_pairs(instruction) else rates.efficiency.products
        busy = flops / (share * rates.flops)
        is_counted = memory >= busy
        if self.cycles and rates.cycles:
            cycles = self.cycles.get(self._keys.key(computation, instruction))
            if cycles is not None:
                busy = cycles / rates.cycles
                is_counted = True
        overlapped = max(busy, memory)
        counted = overlapped if is_counted else 0.0
        return Seconds(busy, memory, overlapped, max(flops / rates.flops, memory), counted, overlapped)


def _overlapped(sums: dict[str, Seconds]) -> float:
    return sum(seconds.overlapped for seconds in sums.values())


def certain_seconds(sums: dict[str, Seconds]) -> float:
    """Sum up the seconds that are spent regardless of which branches are taken."""
    return sum(seconds.certain for seconds in sums.values())


def _add(sums: dict[str, Seconds], more: dict[str, Seconds]) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, Seconds()) + seconds


def purpose(instruction: Instruction) -> str:
    """Return the purpose of an instruction's seconds, from its opcode and the scopes in its name."""
    if instruction.opcode in ("copy", "copy-start", "slice-start", "transpose"):
        return COPIES
    name = instruction.op_name
    if of_chunk_pairs(instruction) or f"/{LOOP}/" in name:
        if "transpose(" not in name:
            return f"{ATTENTION} forward"
        if "rematted_computation" in name:
            return f"{ATTENTION} recomputed"
        return f"{ATTENTION} backward"
    if f"/{ATTEND_TOKEN}/" in name:
        return CACHED
    scope = re.search(rf"[/(]({'|'.join(SCOPES)})[)/]", name)
    if scope is None:
        return OTHER
    return SCOPES[scope[1]]


def of_chunk_pairs(instruction: Instruction) -> bool:
    """Return True for an instruction in a loop over attention's chunk pairs, and for a kernel that processes a list of
    them."""
    return re.search(r"at_most_\d+_trips|flash_(forward|backward)_", instruction.op_name) is not None


def host_waits(program: Program) -> dict[str, float]:
    """Upper bound of the number of times that a GPU waits for its host in one run of a program, by purpose.

    XLA runs a loop with a known trip count entirely from the device's queue. For any other loop and for a conditional,
    the host must read the predicate back before it can launch the next kernels: once before each iteration, and once
    for each conditional. (TPUs decide on the chip.) A loop whose trip count depends on data counts with its bound, and
    every branch counts as reached.
    """
    counts: dict[str, float] = defaultdict(float)
    for name, instruction, times in program.executed_instructions:
        if instruction.opcode == "conditional":
            counts[purpose(instruction)] += times
        elif instruction.opcode == "while" and "known_trip_count" not in instruction.text:
            waits = program.trip_count(name, instruction) + 1  # also after the last iteration
            counts[purpose(instruction)] += times * waits
    return dict(counts)
