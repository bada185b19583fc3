"""Cycles of a TPU's programs, counted in the machine code that its compiler writes, without the TPU.

libtpu dumps the final VLIW program of everything that it generates, XLA's fusions and Pallas kernels alike: a bundle a
line, and a bundle issues in one cycle. A program takes its bundles times the trip counts of the loops around them;
branches are counted as if not taken. Waits for data from HBM are not in it.
"""

import re
from pathlib import Path
from typing import NamedTuple

DUMP = "packed-bundles-post-ra"
"""The dump after the last pass that changes a program: registers are allocated, bundles packed, nops in place."""

_FILE = re.compile(rf"\d+-(?P<name>.+)-\d\d-{DUMP}\.txt")
_BUNDLE = re.compile(r" *(0x[0-9a-f]+|0) ")
_BRANCH = re.compile(r"\bsbr\.rel \(!?%(p\w+)\) target bundleno = (\d+)")
_EXIT = re.compile(r"%(p\w+) = scmp\.ge\.\w+\.totalorder %\w+, (\d+) /\* loop exit test \*/")


class Kernel(NamedTuple):
    """The machine code of one instruction of a compiled program."""

    cycles: float
    bundles: int
    open_loops: int
    """Loops whose trip count the code does not state; their bodies are counted once."""


def dump_flags(folder: Path) -> str:
    """What libtpu must find in LIBTPU_INIT_ARGS, before JAX loads it, to write its final programs to a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^{DUMP}$"


def dumped_kernels(folder: Path) -> dict[str, Path]:
    """The files of a dump by the name of their instruction; of equal instructions the compiler writes the first."""
    files = {}
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match and not match["name"].endswith("schedule-analysis"):
            files[match["name"]] = path
    return files


def read_cycles(folder: Path) -> dict[str, float]:
    """The cycles of every kernel of a finished dump by the name of its instruction."""
    kernels = {name: read_instruction(name, path.read_text()) for name, path in dumped_kernels(folder).items()}
    return {name: kernel.cycles for name, kernel in kernels.items() if kernel}


SHORT = 200
"""Bundles of a conditional part of a grid's step that is taken to run at each of them."""


class Grid(NamedTuple):
    """How often a kernel that walks a list of pairs runs each of its bodies."""

    whole: float
    masked: float
    visits: float


def grid_of(name: str) -> Grid | None:
    """What the name of a kernel says of its grid (`ops/kernels/pair_table.py`); None of other instructions."""
    match = re.search(r"flash_\w+?_(\d+)_whole_(\d+)_masked_(\d+)_visits", name)
    return Grid(*map(int, match.groups())) if match else None


BOTH_CORES = "barrier-megacore-wait"
"""What the program of a grid says that both cores of a chip walk; of a single head one core does, without."""


def read_instruction(name: str, text: str) -> Kernel | None:
    """The kernel of an instruction on one core: if both cores of a chip (megacore) walk its grid, each takes half of
    the batch and heads (of an odd number one more, which is not counted). None as of `read_kernel`."""
    grid = grid_of(name)
    cores = 2 if BOTH_CORES in text else 1
    return read_kernel(text, grid and Grid(*(count / cores for count in grid)))


def read_kernel(text: str, grid: Grid | None = None) -> Kernel | None:
    """The kernel of a dumped program; None if the text is not written to its end."""
    if "End region 0" not in text[-2000:]:
        return None
    code = _Code.read(text)
    cycles = code.cycles(0, code.bundles) if grid is None else code.grid_cycles(grid)
    return Kernel(cycles, code.bundles, sum(trips is None for _, trips in code.loops.values()))


class _Code(NamedTuple):
    bundles: int
    loops: dict[int, tuple[int, int | None]]
    """By their first bundle: the last, and the trip count, None if it is not stated."""
    skipped: list[tuple[int, int]]
    """From each branch forward to its target: what runs under a condition."""

    @staticmethod
    def read(text: str) -> "_Code":
        loops: dict[int, tuple[int, int | None]] = {}
        tests: dict[str, int] = {}
        skipped = []
        number = 0
        for line in text.splitlines():
            bundle = _BUNDLE.match(line)
            if bundle is None:
                continue
            number = int(bundle[1], 16)
            if "loop exit test" in line:
                tests |= {predicate: int(trips) for predicate, trips in _EXIT.findall(line)}
            if "sbr.rel" in line:
                for predicate, target in _BRANCH.findall(line):
                    if int(target) <= number:
                        loops[int(target)] = number, tests.get(predicate)
                    else:
                        skipped.append((number + 1, int(target)))
        return _Code(number + 1, loops, skipped)

    def cycles(self, begin: int, end: int) -> float:
        """Of the bundles from `begin` to before `end`, loops in them as often as they turn."""
        inside = {first: loop for first, loop in self.loops.items() if begin <= first and loop[0] < end}
        total = float(end - begin)
        for first, (last, trips) in inside.items():
            around = 1
            for outer, (outer_last, outer_trips) in inside.items():
                if outer < first and last < outer_last:
                    around *= outer_trips or 1
            total += (last - first + 1) * ((trips or 1) - 1) * around
        return total

    def grid_cycles(self, grid: Grid) -> float:
        """Of the loop over a grid's steps, each of which runs one of two bodies, those without and with a mask, in this
        order the two largest conditional parts. Other long ones run at each visit; the short ones (they set out copies)
        are taken to run at each step."""
        first, last = max(
            ((first, last) for first, (last, _) in self.loops.items()), key=lambda loop: loop[1] - loop[0]
        )
        within = [span for span in self.skipped if first <= span[0] and span[1] <= last + 1]
        parts = [span for span in within if SHORT < span[1] - span[0] < 0.9 * (last - first)]
        outermost = [a for a in parts if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in parts)]
        cycles = {span: self.cycles(*span) for span in outermost}
        whole, masked = sorted(sorted(cycles, key=lambda span: -cycles[span])[:2])
        step = self.cycles(first, last + 1) - sum(cycles.values())
        others = sum(cycles.values()) - cycles[whole] - cycles[masked]
        steps = (grid.whole + grid.masked) * step + grid.whole * cycles[whole] + grid.masked * cycles[masked]
        return steps + grid.visits * others
