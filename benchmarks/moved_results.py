"""Lists the results whose closed form has moved since: their seconds no longer describe the code.

A row of results with a command `ringformer estimate ...` has the seconds of the closed form when it was compiled: those
of the computation, without communication. This runs the command again with --closed_form, which takes some hundredths
of a second, and prints the rows whose seconds differ by more than 5%.

    python benchmarks/moved_results.py
"""

import argparse
import contextlib
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.cli.command_line import main as ringformer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results"
LIMIT = 0.05
"""Largest relative change of a closed form that is not listed."""
COMPILERS_FLAGS = ("--generate_code", "--quick", "--json")


class Row(NamedTuple):
    """An entry of results that `ringformer estimate` made."""

    name: str
    command: str
    closed_form_seconds: float
    made: str
    """Date and commit."""


class Moved(NamedTuple):
    """A row whose closed form has moved."""

    row: Row
    now: float
    """Seconds of the closed form by today's code."""

    def __str__(self) -> str:
        before = self.row.closed_form_seconds
        return f"{self.row.name} ({self.row.made}): closed form {before:.4g} -> {self.now:.4g} s, {self.change:+.0%}"

    @property
    def change(self) -> float:
        return self.now / self.row.closed_form_seconds - 1


def rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of train steps of all files."""
    for path in sorted(folder.glob("*.json")):
        yield from _rows(path.name, json.loads(path.read_text()))


def _rows(name: str, entry: Any) -> Iterator[Row]:
    if isinstance(entry, list):
        for n, item in enumerate(entry):
            yield from _rows(f"{name}[{n}]", item)
    if not isinstance(entry, dict):
        return
    command = entry.get("command")
    seconds = entry.get("closed_form_seconds")
    if seconds and isinstance(command, str) and command.startswith("ringformer estimate"):
        yield Row(name, command, seconds, f"{entry['date']}, {entry['commit']}")
    for key, item in entry.items():
        yield from _rows(f"{name}/{key}", item)


def closed_form(command: str) -> float:
    """Return the seconds of a step by the closed form, by today's code."""
    words = [word for word in shlex.split(command)[1:] if word not in COMPILERS_FLAGS]
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as said:
        code = ringformer([*words, "--closed_form", "--json"])
    if code:
        raise RuntimeError(f"{command} --closed_form ends with {code}: {said.getvalue()}")
    return json.loads(printed.getvalue().splitlines()[0])["step_seconds_model"]


def moved(folder: Path) -> list[Moved]:
    """Return the rows whose closed form has moved by more than `LIMIT`, the largest change first."""
    found = []
    for row in rows(folder):
        change = Moved(row, closed_form(row.command))
        if abs(change.change) > LIMIT:
            found.append(change)
    return sorted(found, key=lambda each: -abs(each.change))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = moved(FOLDER)
    count = sum(1 for _ in rows(FOLDER))
    print(f"{len(found)} of {count} compiled train steps have a closed form that has moved by more than {LIMIT:.0%}")
    for each in found:
        print(f"  {each}")


if __name__ == "__main__":
    main()
