"""Use of a TPU core by a kernel or a whole program: slots, spilled registers, on-chip memory, and bytes of HBM.

Beside a program, libtpu dumps how many slots of each unit every bundle uses. Weighted by how often the bundles run,
these numbers show a kernel's bottleneck: the unit whose slots are nearly full. In a whole program, each instruction
counts as often as it runs.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ringformer.estimate.compiled.program_text import Instruction, Program
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.machine_code import DUMP, Code, Grid, dump_flags, dumped_kernels, grid_of
from ringformer.estimate.seconds.memory_traffic import hbm_bytes

UNITS = {
    "MATMUL": "matrix",
    "VALU": "vector",
    "EUP": "transcendental",
    "XLU": "cross_lane",
    "VLOAD": "load",
    "VSTORE": "store",
}
"""Names of the units, by the names that the compiler gives to their slots."""
_FILLS = "VLOAD:FILL"
_SPILLS = "VSTORE:SPILL"

_SLOTS = "pre-delay_hlo-static-per-bundle-utilization"
_VMEM = "vmem_report"
_COPY = re.compile(r"dma\.(?:hbm_to_vmem|vmem_to_hbm|general) [^;]*?size_in_granules=\*/(\d+)")
"""Pattern of copies between HBM and VMEM; `general` copies move arrays that are not contiguous."""
_GRANULE_BYTES = {"v3": 512, "v4": 512}
"""Bytes of the unit in which the sizes of copies are given, by generation; 32 on later chips."""


class SlotUse(NamedTuple):
    """Use of a core by a kernel, or by one step of its grid."""

    cycles: float
    busy: dict[str, float]
    """Cycles that each of the `UNITS` would take if it filled all of its slots in every cycle."""
    fills: float
    """Number of vector registers read back after a spill."""
    spills: float
    hbm_bytes: float
    """Bytes copied between HBM and VMEM, as an upper bound: every conditional copy counts."""
    vmem_bytes: float
    """Bytes of on-chip memory for blocks, scratch and spills."""

    @property
    def units(self) -> dict[str, float]:
        """Used share of each unit's slots; 1 is full."""
        return {unit: busy / max(self.cycles, 1.0) for unit, busy in self.busy.items()}


def detailed_dump_flags(folder: Path) -> str:
    """Return `dump_flags` with everything that `read_slot_use` reads."""
    return dump_flags(folder, _SLOTS, _VMEM)


def read_slot_use(folder: Path, name: str, generation: str, grid: Grid | None = None) -> SlotUse:
    """Read the slot use of an instruction's kernel from a finished dump made with `detailed_dump_flags`; with `grid`,
    count only the steps of that grid. Raises ValueError if the dump lacks the kernel or its slots."""
    text = _only(folder, f"*-{name}-*-{DUMP}.txt").read_text()
    slots = _only(folder, f"*-{name}-*-{_SLOTS}.txt").read_text()
    runs = Code.read(text).runs(grid)
    capacity, used = _read_slots(slots)
    if any(len(column) != len(runs) for column in used.values()):
        raise ValueError(f"{name}: its slots belong to another program than its {len(runs)} bundles")
    times = {unit: float(runs @ column) for unit, column in used.items()}
    return SlotUse(
        float(runs.sum()),
        {name: times[unit] / capacity[unit] for unit, name in UNITS.items()},
        times[_FILLS],
        times[_SPILLS],
        hbm_bytes=float(runs @ _copied(text, len(runs))) * _GRANULE_BYTES.get(generation, 32),
        vmem_bytes=_vmem_bytes(_only(folder, f"*-{_VMEM}.html").read_text(), name),
    )


def _only(folder: Path, pattern: str) -> Path:
    paths = [path for path in folder.glob(pattern) if "schedule-analysis" not in path.name]
    if len(paths) != 1:
        raise ValueError(f"{folder} has {len(paths)} files {pattern}: exactly one is needed")
    return paths[0]


def _read_slots(text: str) -> tuple[dict[str, int], dict[str, Float[np.ndarray, " bundles"]]]:
    """Return the number of slots that each unit has in a bundle, and the number that each bundle uses. The text holds
    names, capacities, then one bundle per line."""
    names, capacity, _, *bundles = text.partition("\n")[2].splitlines()
    units = names.split(", ")
    columns = np.array(list(map(str.split, bundles)), float).T
    return dict(zip(units, map(int, capacity.split()), strict=True)), dict(zip(units, columns, strict=True))


def _copied(text: str, bundles: int) -> Float[np.ndarray, " bundles"]:
    """Granules copied between HBM and VMEM, by the bundle that starts the copy."""
    granules = np.zeros(bundles)
    for line in text.splitlines():
        if number := re.match(r" *(0x[0-9a-f]+|0) ", line):
            granules[int(number[1], 16)] = sum(map(int, _COPY.findall(line)))
    return granules


def _vmem_bytes(page: str, name: str) -> float:
    """Read an instruction's bytes from the compiler's report of on-chip memory, a page with JSON data."""
    report, _ = json.JSONDecoder().raw_decode(page.partition("const DATA =")[2].lstrip())
    return float(report["hlo_breakdowns"].get(name, {"total_size": 0})["total_size"])


NOTHING = SlotUse(0.0, {}, 0.0, 0.0, 0.0, 0.0)


def one_after_the_other(uses: Iterable[SlotUse]) -> SlotUse:
    """Add up uses; on-chip memory is the maximum."""
    uses = [NOTHING, *uses]
    busy = Counter[str]()
    for use in uses:
        busy.update(use.busy)
    cycles, _, fills, spills, moved, vmem = zip(*uses, strict=True)
    return SlotUse(sum(cycles), dict(busy), sum(fills), sum(spills), sum(moved), max(vmem))


def times(use: SlotUse, count: float) -> SlotUse:
    """Multiply a use by a count, which may be a fraction."""
    busy = {unit: cycles * count for unit, cycles in use.busy.items()}
    return use._replace(
        cycles=use.cycles * count,
        busy=busy,
        fills=use.fills * count,
        spills=use.spills * count,
        hbm_bytes=use.hbm_bytes * count,
    )


@dataclass(frozen=True)
class ProgramSlots:
    """Slots used by a program's computations, from a finished dump with `detailed_dump_flags`."""

    program: Program
    folder: Path
    generation: str
    _uses: dict[str, SlotUse] = field(default_factory=dict)

    @cached_property
    def _keys(self) -> KernelKeys:
        return KernelKeys(self.program)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names of the instructions whose machine code was dumped, by key; the compiler dumps equal instructions only
        once."""
        return self._keys.named(dumped_kernels(self.folder))

    def of_computation(self, name: str) -> SlotUse:
        """Return the use of one run of a computation and everything that it calls; a conditional counts as its longest
        branch."""
        if name not in self._uses:
            uses = [self.of_instruction(name, i) for i in self.program.computations[name].values()]
            self._uses[name] = one_after_the_other(uses)
        return self._uses[name]

    def of_instruction(self, computation: str, instruction: Instruction) -> SlotUse:
        """Return the use of one run of an instruction. An instruction without machine code of its own only moves
        bytes."""
        if instruction.opcode == "while":
            turns = self.program.trip_count(computation, instruction)
            return times(self.of_computation(instruction.called[0]), turns)
        if instruction.opcode == "conditional":
            return max(map(self.of_computation, instruction.called), key=lambda use: use.cycles)
        if instruction.opcode == "call" and not instruction.collective:
            return self.of_computation(instruction.called[0])
        moved = hbm_bytes(self.program, computation, instruction)
        if name := self._names.get(self._keys.key(computation, instruction)):
            return read_slot_use(self.folder, name, self.generation, grid_of(name))._replace(hbm_bytes=moved)
        return NOTHING._replace(hbm_bytes=moved)
