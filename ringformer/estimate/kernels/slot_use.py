"""Use of a TPU core by a kernel: slots, spilled registers, on-chip memory, and bytes of HBM.

libtpu dumps, beside a program, how many slots of each unit every bundle uses. Weighted by how often the bundles run,
this shows a kernel's bottleneck: the unit whose slots are nearly full.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ringformer.estimate.seconds.machine_code import DUMP, Grid, bundle_runs, dump_flags

UNITS = {
    "MATMUL": "matrix",
    "VALU": "vector",
    "EUP": "transcendental",
    "XLU": "cross_lane",
    "VLOAD": "load",
    "VSTORE": "store",
}
"""Names of the units by the compiler's names of their slots."""
_FILLS, _SPILLS = "VLOAD:FILL", "VSTORE:SPILL"

_SLOTS, _VMEM = "pre-delay_hlo-static-per-bundle-utilization", "vmem_report"
_COPY = re.compile(r"dma\.(\w+) [^;]*?size_in_granules=\*/(\d+)")
_OF_HBM = ("hbm_to_vmem", "vmem_to_hbm", "general")
"""Copies between HBM and VMEM; `general` copies are those of arrays that are not contiguous."""
_GRANULE_BYTES = {"v3": 512, "v4": 512}
"""Unit in which sizes of copies are counted; 32 bytes on later chips."""


class SlotUse(NamedTuple):
    """Use by a kernel, or by one step of its grid."""

    cycles: float
    units: dict[str, float]
    """Used share of each unit's slots, by `UNITS`; 1 is full."""
    fills: float
    """Number of vector registers read back after a spill."""
    spills: float
    hbm_bytes: float
    """Upper bound of the bytes copied between HBM and VMEM: every conditional copy counts."""
    vmem_bytes: float
    """Bytes of on-chip memory for blocks, scratch and spills."""


def detailed_dump_flags(folder: Path) -> str:
    """Return `dump_flags` with everything that `read_slot_use` reads."""
    return dump_flags(folder, f"{_SLOTS}|{_VMEM}")


def read_slot_use(folder: Path, name: str, generation: str, grid: Grid | None = None) -> SlotUse:
    """Read an instruction's kernel's slot use from a finished dump made with `detailed_dump_flags`; if `grid` is given,
    count only those grid steps. Raises ValueError if the dump lacks the kernel or its slots."""
    text, slots = (_only(folder, f"*-{name}-*-{what}.txt").read_text() for what in (DUMP, _SLOTS))
    runs = bundle_runs(text, grid)
    capacity, used = _read_slots(slots)
    if any(len(column) != len(runs) for column in used.values()):
        raise ValueError(f"{name}: its slots belong to another program than its {len(runs)} bundles")
    cycles = float(runs.sum())
    times = {unit: float(runs @ column) for unit, column in used.items()}
    shares = {name: times[unit] / (capacity[unit] * max(cycles, 1.0)) for unit, name in UNITS.items()}
    return SlotUse(
        cycles,
        shares,
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
    columns = np.array([line.split() for line in bundles], float).T
    return dict(zip(units, map(int, capacity.split()), strict=True)), dict(zip(units, columns, strict=True))


def _copied(text: str, bundles: int) -> Float[np.ndarray, " bundles"]:
    """Granules copied between HBM and VMEM, by the bundle that starts the copy."""
    granules = np.zeros(bundles)
    for line in text.splitlines():
        if number := re.match(r" *(0x[0-9a-f]+|0) ", line):
            granules[int(number[1], 16)] = sum(int(size) for kind, size in _COPY.findall(line) if kind in _OF_HBM)
    return granules


def _vmem_bytes(page: str, name: str) -> float:
    """Read an instruction's bytes from the compiler's report of on-chip memory, a page with JSON data."""
    report, _ = json.JSONDecoder().raw_decode(page.partition("const DATA =")[2].lstrip())
    return float(report["hlo_breakdowns"].get(name, {"total_size": 0})["total_size"])
