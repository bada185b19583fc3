"""Cycles of TPU programs, counted in the machine code that the compiler writes, without the TPU.

libtpu dumps the final VLIW program of everything that it generates, for XLA's fusions and for Pallas kernels, one
bundle per line. A bundle issues in one cycle. Each bundle counts as often as the loops around it run, as if no branch
were taken. Time spent waiting for data from HBM is not included.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

DUMP = "packed-bundles-post-ra"
"""Name of the dump after the last pass that changes a program: registers are allocated, bundles packed and nops in
place."""

_FILE = re.compile(rf"\d+-(.+)(?<!schedule-analysis)-\d\d-{DUMP}\.txt")
_BUNDLE = re.compile(r" *(0x[0-9a-f]+|0) ")
_BRANCH = re.compile(r"\bsbr\.rel \(!?%(p\w+)\) target bundleno = (\d+)")
_EXIT = re.compile(r"%(p\w+) = scmp\.ge\.\w+\.totalorder %\w+, (\d+) /\* loop exit test \*/")


def dump_flags(folder: Path, *more: str) -> str:
    """Return the flags that make libtpu write its final programs to a folder; they must be in LIBTPU_INIT_ARGS before
    JAX loads it. `more` names additional dumps."""
    dumps = f"^({'|'.join((DUMP, *more))})$"
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={dumps}"


def dumped_kernels(folder: Path) -> dict[str, Path]:
    """Return the files of a dump by the names of their instructions; the compiler writes equal instructions only
    once."""
    files = {}
    for path in folder.iterdir():
        if match := _FILE.fullmatch(path.name):
            files[match[1]] = path
    return files


def read_kernels(folder: Path) -> dict[str, float]:
    """Read the cycles of every kernel in a finished dump, by the name of its instruction."""
    cycles = {}
    for name, path in dumped_kernels(folder).items():
        count = read_cycles(path.read_text(), grid_of(name))
        if count is not None:
            cycles[name] = count
    return cycles


SHORT = 200
"""Largest number of bundles of a conditional part of a grid step that is assumed to run in every step."""


class Grid(NamedTuple):
    """Number of runs of each body of a kernel that walks a list of pairs."""

    whole: int
    masked: int
    visits: int
    heads: int = 1
    """Number of equal parts of the grid, which the cores of a device divide among them."""


def grid_of(name: str) -> Grid | None:
    """Parse a kernel's grid from its name (`ops/kernels/pair_table.py`); None for other instructions."""
    match = re.search(r"flash_\w+?_(\d+)_whole_(\d+)_masked_(\d+)_visits_(\d+)_heads", name)
    if match is None:
        return None
    return Grid(*map(int, match.groups()))


def read_cycles(text: str, grid: Grid | None = None) -> float | None:
    """Read the cycles of a dumped program; None if the text is incomplete."""
    if "End region 0" not in text[-2000:]:
        return None
    return float(Code.read(text).runs(grid).sum())


class Code(NamedTuple):
    """Machine code of one instruction of a compiled program."""

    bundles: int
    loops: dict[int, tuple[int, int | None]]
    """Last bundle and trip count of each loop, by the loop's first bundle; None if the trip count is not stated."""
    skipped: list[tuple[int, int]]
    """Ranges of bundles from each forward branch to its target: the parts that run only under a condition."""
    products: list[int]
    """Numbers of the bundles that feed a matrix unit."""
    cores: int
    """Number of cores that share a kernel's grid."""

    @staticmethod
    def read(text: str) -> "Code":
        loops: dict[int, tuple[int, int | None]] = {}
        tests: dict[str, int] = {}
        skipped = []
        products = []
        number = 0
        for line in text.splitlines():
            if (bundle := _BUNDLE.match(line)) is None:
                continue
            number = int(bundle[1], 16)
            if "vmatmul" in line:
                products.append(number)
            if "loop exit test" in line:
                for predicate, trips in _EXIT.findall(line):
                    tests[predicate] = int(trips)
            if "sbr.rel" in line:
                for predicate, target in _BRANCH.findall(line):
                    if int(target) <= number:
                        loops[int(target)] = number, tests.get(predicate)
                    else:
                        skipped.append((number + 1, int(target)))
        cores = 2 if "megacore core id" in text else 1
        return Code(number + 1, loops, skipped, products, cores)

    def runs(self, grid: Grid | None) -> Float[np.ndarray, " bundles"]:
        """Return how often each bundle runs: the product of the trip counts of the loops around it. With a grid, these
        are the runs on the core with the most heads."""
        turns = np.ones(self.bundles)
        steps = None
        if grid:
            steps = max(self.loops, key=lambda first: self.loops[first][0] - first, default=None)
        for first, (last, trips) in self.loops.items():
            if first != steps:
                turns[first : last + 1] *= trips or 1
        if grid is None or steps is None:
            return turns
        return turns * self._runs_of_grid(grid, steps) * (-(-grid.heads // self.cores) / grid.heads)

    def _runs_of_grid(self, grid: Grid, first: int) -> Float[np.ndarray, " bundles"]:
        """Return how often each bundle of the loop over a grid's steps runs. Each step runs one of two bodies, without
        or with a mask: the conditional parts with matrix products, in this order. If there is only one body, it runs in
        every step. Of the other parts, long ones run in every visit; short ones, which start copies, are assumed to run
        in every step."""
        last, _ = self.loops[first]
        parts = []
        for start, end in self.skipped:
            if first <= start and end <= last + 1 and SHORT < end - start < 0.9 * (last - first):
                parts.append((start, end))
        outermost = [part for part in parts if not _is_inside(part, parts)]
        bodies = sorted(filter(self._has_products, outermost))
        steps = np.zeros(self.bundles)
        steps[first : last + 1] = grid.whole + grid.masked
        for span in outermost:
            steps[slice(*span)] = grid.visits
        if len(bodies) == 1:
            steps[slice(*bodies[0])] = grid.whole + grid.masked
        elif bodies:
            for span, times in zip(bodies, (grid.whole, grid.masked), strict=True):
                steps[slice(*span)] = times
        return steps

    def _has_products(self, span: tuple[int, int]) -> bool:
        return any(span[0] <= at < span[1] for at in self.products)


def _is_inside(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    """Return True if one of the others contains the span."""
    return any(other[0] <= span[0] and span[1] <= other[1] and other != span for other in others)
