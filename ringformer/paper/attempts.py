"""The files of what was compiled for the tables: attempts by the name of their cell, and by what they were compiled."""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringformer.estimate.targets import MissingCompiler, Target, compiled_by, find_target


def read(path: Path) -> dict[str, Any]:
    """The attempts of each cell, by its name; none if there is no file."""
    return json.loads(path.read_text())["cells"] if path.exists() else {}


def write_cells(path: Path, about: str, command: str, known: Mapping[str, Any]) -> None:
    """Write what `read` reads, with what it is and the command that fills it; at any time the file is a whole one."""
    content = {"what": about, "command": command, "cells": dict(sorted(known.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def stamp(target: Target) -> dict[str, str]:
    """When and by what an attempt is made today."""
    return {"date": datetime.date.today().isoformat(), "compiled_by": compiled_by(target)}


def installed(targets: Iterable[str], log: Callable[[str], None]) -> set[str]:
    """The names of the targets whose compiler is there; of each other one it is said what to install."""
    there = set()
    for name in dict.fromkeys(targets):
        try:
            find_target(name).require_compiler()
        except MissingCompiler as missing:
            log(f"{name} is left out: {missing}")
        else:
            there.add(name)
    return there


def other_compilers(before: Mapping[str, set[str]]) -> list[str]:
    """A line for each target whose attempts were compiled by another compiler than the one that is installed."""
    lines = []
    for name, compilers in before.items():
        with suppress(MissingCompiler):
            now = compiled_by(find_target(name))
            if others := compilers - {now}:
                lines.append(f"{name}: attempts of {'; '.join(sorted(others))} stand in the file, the compiler here is "
                             f"{now}: bytes and seconds may differ a little")  # fmt: skip
    return lines
