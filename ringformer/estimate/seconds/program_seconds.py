"""Seconds of a compiled program on one device: cycles of its machine code where they are known, bytes, and FLOPs.

An instruction takes the larger of its cycles at the chip's clock and its HBM bytes at the memory's rate, as often as it
is executed: data are fetched while the units compute. Where no machine code is known, its FLOPs at a share of the peak
stand for the cycles. Communication is not in it; the schedule says what of that is exposed (`overlap.py`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ringformer.estimate.compiler.program_text import Instruction, Program
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.memory_traffic import hbm_bytes
from ringformer.hardware import CHIPS
from ringformer.inference.cached_attention import ATTEND_TOKEN
from ringformer.ops.kernels.chunk_sizes import tuned_share
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.ops.ring_attention import LOOP

ATTENTION, COPIES, OTHER = "attention", "copies and layout changes", "other"
CACHED = "attention to the cache"
SCOPES = {
    "attention": "projections",
    "feed_forward": "feed-forward",
    "loss": "loss",
    "embedding": "embedding",
    "optimizer": "optimizer",
}
"""What a `jax.named_scope` of the model or of the train step is called in a report; of attention, all but the pairs."""


class Efficiency(NamedTuple):
    """Shares of the peak that stand for the cycles of matrix products where no machine code says them."""

    pairs: float = 0.55
    """Of a chunk pair's products: with it, attention takes the seconds of its machine code, exponentials and all."""
    products: float = 0.85
    """Of all others."""
    pairs_of: str = ""
    """Whose the first is; empty: XLA's code."""

    def __str__(self) -> str:
        whose = f" ({self.pairs_of})" if self.pairs_of else ""
        return f"FLOPs at {self.pairs:.0%} of the peak in attention{whose}, {self.products:.0%} elsewhere"


USUAL = Efficiency()
"""What the machine code of v5e says; for all generations whose own was not read in whole."""

_EFFICIENCY = {
    "v4": Efficiency(0.27, 0.70),
    "v5p": Efficiency(0.55, 0.82),
    "v6e": Efficiency(0.12, 0.63),
    "tpu7x": Efficiency(0.12, 0.63),
}
"""What the machine code of whole 7B steps says (results/part_cycles.json); of tpu7x that of their attention alone,
the rest v6e's, whose matrix units are of the same size."""


_CUDNN = 0.61, "cuDNN's by NVIDIA's table of H200"
"""Causal bfloat16 of 16K tokens, 64 heads of 128 on 8: 673 TFLOP/s forward, 579 backward of a peak of 989."""

_PALLAS = "the kernels' by their machine code"


def efficiency(generation: str, kernel: str = "xla", head_dim: int = LANES) -> Efficiency:
    """That of a key of CHIPS, with what computes the blocks of attention (`ops/kernels/block_kernels.py`), for heads of
    so many features: on TPU a product over less than 128, or no whole multiple, takes as long as one over the next."""
    known = _EFFICIENCY.get(generation, USUAL)
    chip = CHIPS.get(generation)
    if kernel == "cudnn":
        return known._replace(pairs=_CUDNN[0], pairs_of=_CUDNN[1])
    if kernel == "pallas" and (share := tuned_share(generation, head_dim)):
        return known._replace(pairs=share, pairs_of=_PALLAS)
    padded = -(-head_dim // LANES) * LANES if chip and chip.tensor_cores else head_dim
    return known._replace(pairs=known.pairs * head_dim / padded)


class Rates(NamedTuple):
    """What a device can do in a second."""

    flops: float
    """Of matrix products in the program's dtype, at the peak."""
    hop_bytes: float
    """Bytes of a permute, one way."""
    gather_bytes: float
    """Bytes of a gather or reduction, over all links that it spreads over."""
    hbm_bytes: float
    cycles: float
    """The clock; 0 where machine code is not counted (GPU)."""
    efficiency: Efficiency = USUAL
    host_bytes: float = math.inf
    """Bytes between a device and its host, one way."""


class Seconds(NamedTuple):
    """Seconds of instructions: with data fetched while the units compute, and what bounds that."""

    busy: float = 0.0
    """Of the units: cycles, or FLOPs at an efficiency."""
    memory: float = 0.0
    """Of HBM bytes."""
    overlapped: float = 0.0
    """The estimate: the larger of the two for each instruction."""
    floor: float = 0.0
    """The roofline: the larger of FLOPs at the peak and HBM bytes."""
    counted: float = 0.0
    """Of the estimate what has machine code, or moves bytes for longer than it could compute."""
    certain: float = 0.0
    """Of the estimate what passes whichever branches are taken."""

    def __add__(self, other):
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> "Seconds":
        return Seconds(*(x * count for x in self))


@dataclass(frozen=True)
class ProgramSeconds:
    """Seconds of every instruction of a program, each with all that it calls."""

    program: Program
    rates: Rates
    cycles: Mapping[str, float] = field(default_factory=dict)
    """Of known machine code, by `KernelKeys.key`."""
    _keys: KernelKeys = field(init=False)
    _computations: dict[str, dict[str, Seconds]] = field(default_factory=dict, init=False)

    def __post_init__(self):
        object.__setattr__(self, "_keys", KernelKeys(self.program))

    @property
    def purposes(self) -> dict[str, Seconds]:
        """The seconds of one run of the whole program by what they are for (`purpose`)."""
        return self.of_computation(self.program.entry)

    def of_computation(self, name: str) -> dict[str, Seconds]:
        """One run of a computation; no less than its HBM bytes, those of asynchronous copies too, take."""
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
        """One run of an instruction; of branches, the slowest: the ring waits for its busiest rank."""
        if instruction.opcode == "while":
            trips = self.program.trip_count(computation, instruction)
            sums: dict[str, Seconds] = {}
            for name, seconds in self.of_computation(instruction.called[0]).items():
                # GPU compilers make one computation of equal ones: its names are those of one of the loops around it
                shared = of_chunk_pairs(instruction) and name.startswith(ATTENTION)
                _add(sums, {purpose(instruction) if shared else name: seconds.times(trips)})
            return sums
        if instruction.opcode == "conditional":
            branches = [self.of_computation(name) for name in instruction.called]
            sums = {k: s._replace(certain=0.0) for k, s in max(branches, key=_overlapped).items()}
            certain = min(sum(s.certain for s in branch.values()) for branch in branches)
            _add(sums, {OTHER: Seconds(certain=certain)})
            return sums
        if instruction.opcode == "call" and not instruction.collective:
            return self.of_computation(instruction.called[0])
        seconds = self._alone(computation, instruction)
        return {purpose(instruction): seconds} if any(seconds) else {}

    def _alone(self, computation: str, instruction: Instruction) -> Seconds:
        flops = self.program.instruction_flops(computation, instruction)
        memory = hbm_bytes(self.program, computation, instruction) / self.rates.hbm_bytes
        cycles = self._known_cycles(computation, instruction)
        share = self.rates.efficiency.pairs if of_chunk_pairs(instruction) else self.rates.efficiency.products
        guess = flops / (share * self.rates.flops)
        busy = guess if cycles is None else cycles / self.rates.cycles
        if instruction.opcode.endswith("-start"):  # beside what follows it; of_computation sees to its bytes
            return Seconds(memory=memory)
        overlapped = max(busy, memory)
        counted = overlapped if cycles is not None or memory >= guess else 0.0
        return Seconds(busy, memory, overlapped, max(flops / self.rates.flops, memory), counted, overlapped)

    def _known_cycles(self, computation: str, instruction: Instruction) -> float | None:
        if not self.cycles or not self.rates.cycles:
            return None
        return self.cycles.get(self._keys.key(computation, instruction))


def _overlapped(sums: dict[str, Seconds]) -> float:
    return sum(seconds.overlapped for seconds in sums.values())


def _add(sums: dict[str, Seconds], more: dict[str, Seconds]) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, Seconds()) + seconds


def purpose(instruction: Instruction) -> str:
    """What an instruction's seconds are for, by its opcode and the scopes in its name."""
    if instruction.opcode in ("copy", "copy-start", "slice-start", "transpose"):
        return COPIES
    name = instruction.op_name
    if of_chunk_pairs(instruction) or f"/{LOOP}/" in name:
        if "transpose(" not in name:
            return f"{ATTENTION} forward"
        return f"{ATTENTION} {'recomputed' if 'rematted_computation' in name else 'backward'}"
    if f"/{ATTEND_TOKEN}/" in name:
        return CACHED
    scope = re.search(rf"[/(]({'|'.join(SCOPES)})[)/]", name)
    return SCOPES[scope[1]] if scope else OTHER


def of_chunk_pairs(instruction: Instruction) -> bool:
    """Whether an instruction stands in a loop over chunk pairs of attention, or is a kernel that walks them."""
    return re.search(r"at_most_\d+_trips|flash_(forward|backward)_", instruction.op_name) is not None
