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
    kernels = {name: read_kernel(path.read_text()) for name, path in dumped_kernels(folder).items()}
    return {name: kernel.cycles for name, kernel in kernels.items() if kernel}


def read_kernel(text: str) -> Kernel | None:
    """The kernel of a dumped program; None if the text is not written to its end."""
    if "End region 0" not in text[-2000:]:
        return None
    loops: dict[int, tuple[int, int | None]] = {}  # by their first bundle: the last, and the trip count
    tests: dict[str, int] = {}
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
    cycles = float(number + 1)
    for first, (last, trips) in loops.items():
        around = 1
        for outer, (outer_last, outer_trips) in loops.items():
            if outer < first and last < outer_last:
                around *= outer_trips or 1
        cycles += (last - first + 1) * ((trips or 1) - 1) * around
    return Kernel(cycles, number + 1, sum(trips is None for _, trips in loops.values()))
