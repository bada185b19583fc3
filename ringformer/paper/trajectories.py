"""The part of the paper's Table 5 that compilers decide: how many trajectories fit in a context.

The table compares agents that see 32 or 128 trajectories at once (section 5.4). The paper names neither the hardware
nor the batch. The cells here use eight devices, which train eight sequences with FSDP, or one sequence with the ring.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from ringformer.estimate.search.longest_context import next_length
from ringformer.estimate.workloads.targets import find_target
from ringformer.hardware import GiB
from ringformer.models.own_attention import ATTENTION
from ringformer.paper.cells import REGIMES, Cell, K, Row
from ringformer.paper.max_context import Results, longest

TABLE = "table5"
"""First part of the names of its cells."""
MODEL = "agentic_350m"
TRAJECTORY = 4 * K
"""Tokens of a trajectory: 1,000 steps of four (return, state, action, reward), rounded up so that 32 and 128
trajectories are 128K and 512K tokens."""

PAPER = {"memory_efficient": {32: False}, "blockwise": {32: True, 128: False}, "ring": {128: True}}
"""The paper's answers to whether a number of trajectories fits, by attention."""


@dataclass(frozen=True)
class TrajectoryRow(Row):
    """A chip of Table 5. The paper's contexts belong to no chip, so the row has none."""

    command: ClassVar[str] = f"ringformer tables --only={TABLE}"

    @property
    def name(self) -> str:
        return f"{TABLE}/{super().name}"

    def required_lengths(self, attention: str) -> tuple[int, ...]:
        """Return the contexts that the paper names for a kind of attention."""
        return tuple(n * TRAJECTORY for n in PAPER.get(attention, ()))


ROWS = tuple(TrajectoryRow(target, MODEL, 8, 1) for target in ("v4-16", "v5e-8", "8xA100-80"))


def cells() -> list[Cell]:
    """Return the cells of every chip and attention, in float32 and bf16."""
    of_setups: list[Cell] = []
    for of_setup in setups().values():
        of_setups += of_setup.values()
    return of_setups


def setups() -> dict[tuple[str, str], dict[str, Cell]]:
    """Return the cells by attention of each (target, compute dtype)."""
    by_setup = {}
    for regime, row in product(REGIMES[:2], ROWS):
        of_setup = {kind: Cell(row, kind, regime, row.devices) for kind in ATTENTION}
        of_setup["ring"] = Cell(row, "ring", regime, 1)
        by_setup[row.target, regime.compute_dtype] = of_setup
    return by_setup


def most_rows(results: Results) -> list[str]:
    """Return the rows of a table: the most trajectories that fit, a power of two, for each kind of attention."""
    rows = []
    for (target, dtype), of_setup in setups().items():
        texts = [_most_text(results[cell.name]) for cell in of_setup.values()]
        rows.append(f"| {target} | {dtype} | {' | '.join(texts)} |")
    return rows


def _most_text(attempts: list[dict[str, Any]]) -> str:
    if not attempts:
        return ""
    best = longest(attempts)
    if best is None:
        return "none"
    sign = "" if next_length(attempts, 0) is None else "≥ "
    return f"{sign}{best['seq_len'] / TRAJECTORY:g}"


def paper_rows(results: Results) -> list[str]:
    """Return the rows of a table: whether the paper's cells fit, and the GiB of a device that they take."""
    rows = []
    for (target, dtype), of_setup in setups().items():
        texts = []
        for kind, answers in PAPER.items():
            attempts = results[of_setup[kind].name]
            for number in answers:
                texts.append(_cell_text(attempts, number))
        rows.append(f"| {target} | {dtype} | {find_target(target).budget / GiB:.2f} | {' | '.join(texts)} |")
    return rows


def _cell_text(attempts: list[dict[str, Any]], trajectories: int) -> str:
    for attempt in attempts:
        if attempt["seq_len"] == trajectories * TRAJECTORY:
            verdict = "fits" if attempt["fits"] else "no"
            return f"{verdict}, {attempt['peak_bytes'] / GiB:.2f}"
    return ""
