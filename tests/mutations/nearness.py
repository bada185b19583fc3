"""Order tests by how likely they catch a change of a file: the nearest first, by imports, then the cheapest.

The distance of a test's module to a source file is the number of imports on the shortest way between them.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.commit import ROOT

UNKNOWN_SECONDS = 1.0
"""Assumed for a test that the measured costs do not have."""

OVERHEAD = 0.01
"""CPU-seconds that pytest adds to each test."""

SHARE = 0.5
"""Share of a round's CPU-seconds that the tests of one module may take."""


class Round(NamedTuple):
    """Limits of the tests that run in one fork."""

    seconds: float
    """CPU-seconds."""
    modules: int


class Test(NamedTuple):
    """A test and its cost."""

    name: str
    """The node id."""
    seconds: float
    """CPU-seconds."""

    __test__ = False

    @property
    def module(self) -> str:
        return self.name.split("::")[0]

    @property
    def cost(self) -> float:
        return self.seconds + OVERHEAD


def read_costs(path: Path | None) -> dict[str, float]:
    """Read CPU-seconds by node id from lines `seconds node-id`, as `--measure` prints them; other lines are ignored."""
    text = path.read_text() if path else ""
    return {name: float(seconds) for seconds, name in re.findall(r"^ *(\d+\.\d+) +(tests/\S+::.+?) *$", text, re.M)}


@cache
def source_files() -> dict[str, str]:
    """Return the path of each Python module of the package and of the tests, from the repository's root."""
    paths = [path.relative_to(ROOT) for folder in ("ringformer", "tests") for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): str(path) for path in sorted(paths)}


@cache
def imports(file: str) -> tuple[str, ...]:
    """Return the files that a file imports, anywhere in it, or names in a string, for a process say."""
    modules = source_files()
    named = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            named.add(node.module)
            named.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.update(re.findall(r"\b(?:ringformer|tests)(?:\.\w+)+", node.value))
    return tuple(sorted(modules[name] for name in named if name in modules))


@cache
def distances(module: str) -> dict[str, int]:
    """Return the distance of a test's module to each file that it reaches."""
    reached = {module: 0}
    latest = [module]
    while latest:
        following = []
        for file in latest:
            for imported in imports(file):
                if imported not in reached:
                    reached[imported] = reached[file] + 1
                    following.append(imported)
        latest = following
    return reached


def files_near(modules: set[str], distance: int = 2) -> list[str]:
    """Return the package's files within a distance of any of the tests' modules."""
    near = set()
    for module in modules:
        for file, imports_between in distances(module).items():
            if file.startswith("ringformer/") and imports_between <= distance:
                near.add(file)
    return sorted(near)


def nearest_first(file: str, tests: list[Test]) -> list[Test]:
    """Return the tests that reach a file: by distance, those of its own room first, then by cost."""
    by_module = defaultdict(list)
    for test in tests:
        by_module[test.module].append(test)

    def key(module: str):
        folder = Path(module.replace("tests/", "ringformer/", 1)).parent
        own = folder / Path(module).name.removeprefix("test_")
        is_own_test = own == Path(file)
        is_own_room = folder == Path(file).parent
        of_module = by_module[module]
        mean = sum(test.seconds for test in of_module) / len(of_module)
        return not is_own_test, distances(module)[file], not is_own_room, mean, module

    reaching = [module for module in by_module if file in distances(module)]
    ordered = []
    for module in sorted(reaching, key=key):
        ordered += sorted(by_module[module], key=lambda test: test.seconds)
    return ordered


def affordable(tests: list[Test], round_: Round) -> list[Test]:
    """Return the first tests that a round has room for, at most `SHARE` of it in one module."""
    chosen = []
    left = round_.seconds
    of_module: dict[str, float] = {}
    for test in tests:
        if test.module not in of_module and len(of_module) == round_.modules:
            continue
        seconds = of_module.get(test.module, 0.0) + test.cost
        if test.cost <= left and seconds <= SHARE * round_.seconds:
            chosen.append(test)
            left -= test.cost
            of_module[test.module] = seconds
    return chosen
