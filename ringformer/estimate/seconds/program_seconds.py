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
from ringformer.hardware.shares import SHARES
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
    """Shares of the peaks that a program reaches where no machine code is counted."""

    forward: float
    """Share of the peak FLOP/s for the products of chunk pairs, forward."""
    backward: float
    """The same in the backward pass, logits computed again included."""
    products: float
    """Share of the peak FLOP/s for all other products."""
    source: str
    """Kind and source of the shares."""
    pairs_of: str = ""
    """Source of `forward` and `backward`, if it is another."""
    memory: float = 1.0
    """Share of the rate of HBM for bytes."""
    cached: float = 1.0
    """The same for attention to a cache."""
    host_wait: float = 0.0
    """Seconds that a GPU waits for its host in one turn of a loop of unknown length."""
    token: float = 0.0
    """Seconds of a decoded token that its bytes do not explain."""

    def __str__(self) -> str:
        pairs = f"{self.forward:.0%} of the peak in attention"
        if self.backward != self.forward:
            pairs += f" forward, {self.backward:.0%} backward"
        of_pairs = self.pairs_of and f" ({self.pairs_of})"
        text = f"FLOPs at {pairs}{of_pairs}, {self.products:.0%} elsewhere"
        if self.memory < 1:
            text += f", bytes at {self.memory:.0%} of the memory's rate"
        return f"{text} ({self.source})"


_PALLAS = "the kernels' by their machine code"


def efficiency(generation: str, kernel: str = "xla", head_dim: int = LANES, int8_cache: bool = False) -> Efficiency:
    """Return the shares for a generation (a key of CHIPS), for the kernel that computes attention's blocks
    (`ops/kernels/block_kernels.py`), for heads of `head_dim` features and for the dtype of a cache. On TPU, a product
    over a number of features that is not a multiple of 128 takes as long as a product over the next multiple."""
    own = SHARES[generation]
    pairs_of = ""
    if kernel == "cudnn":
        forward, backward = own.cudnn(head_dim)
    elif kernel == "pallas" and (share := tuned_share(generation, head_dim)):
        forward = backward = share
        pairs_of = _PALLAS
    else:
        padded = head_dim
        if CHIPS[generation].tensor_cores:
            padded = -(-head_dim // LANES) * LANES
        forward = backward = own.attention * head_dim / padded
    return Efficiency(
        forward,
        backward,
        own.products,
        source=str(own),
        pairs_of=pairs_of,
        memory=own.memory,
        cached=own.int8_cache if int8_cache else own.memory,
        host_wait=own.host_wait,
        token=own.token,
    )


USUAL = efficiency("v5e")
"""Shares of XLA's code on v5e."""


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
            moving = sum(s.memory for s in sums.values())
            waiting = moving - _overlapped(sums)
            if waiting > 0:
                at_full_rate = moving * self.rates.efficiency.memory - sum(s.floor for s in sums.values())
                floor = min(waiting, max(0.0, at_full_rate))
                _add(sums, {COPIES: Seconds(overlapped=waiting, floor=floor, counted=waiting)})
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
        named = instruction
        if instruction.opcode == "fusion" and not instruction.op_name:
            named = self.program.root(instruction.called[0])
        seconds = self._alone(computation, instruction, purpose(named))
        if not any(seconds):
            return {}
        return {purpose(named): seconds}

    def _alone(self, computation: str, instruction: Instruction, for_purpose: str) -> Seconds:
        flops = self.program.instruction_flops(computation, instruction)
        rates = self.rates
        at_full_rate = hbm_bytes(self.program, computation, instruction) / rates.hbm_bytes
        share_of_rate = rates.efficiency.cached if for_purpose == CACHED else rates.efficiency.memory
        memory = at_full_rate / share_of_rate
        if instruction.opcode.endswith("-start"):  # overlaps with what follows; of_computation counts its bytes
            return Seconds(memory=memory)
        share_of_peak = rates.efficiency.products
        if of_chunk_pairs(instruction):
            is_backward = for_purpose == f"{ATTENTION} backward"
            share_of_peak = rates.efficiency.backward if is_backward else rates.efficiency.forward
        busy = flops / (share_of_peak * rates.flops)
        is_counted = memory >= busy
        if self.cycles and rates.cycles:
            cycles = self.cycles.get(self._keys.key(computation, instruction))
            if cycles is not None:
                busy = cycles / rates.cycles
                is_counted = True
        overlapped = max(busy, memory)
        counted = overlapped if is_counted else 0.0
        floor = max(flops / rates.flops, at_full_rate)
        return Seconds(busy, memory, overlapped, floor, counted, overlapped)


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
