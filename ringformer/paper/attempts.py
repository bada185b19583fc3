"""The files of what was compiled for the tables: attempts by the name of their cell, and by what they were compiled."""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringformer.estimate.targets import MissingCompiler, Target, compiled_by, find_target

NUMBER = int | float
TRIED: dict[str, Any] = {
    "seq_len": int,
    "fits": bool,
    "head_groups": int,
    "remat_group": int,
    "compiled_by": str,
    "date": str,
}
"""What every attempt says, with its type."""
FITTING = dict.fromkeys(
    (
        "peak_bytes",
        "host_bytes",
        "step_seconds_model",
        "hidden_permute_bytes",
        "exposed_permute_bytes",
        "exposed_in_ring_loops_bytes",
    ),
    NUMBER,
)
"""What one that fits says, too."""
RUN = {"peak_bytes": NUMBER, "mesh_dim": str, "batch_size": int, "accumulate": int, "seconds_by_purpose": dict | None}
RUN |= dict.fromkeys(("step_seconds_model", "mfu_palm_model", "mfu_causal_model"), NUMBER | None)
"""What a run of Table 4 says, too, whether it fits or not."""


def read(path: Path) -> dict[str, list[dict]]:
    """The attempts of each cell of Table 3, by its name; none if there is no file. Raises ValueError, as for all files
    here, if it is not such a file."""
    cells = entries(path, "cells")
    for name, tried in cells.items():
        if not isinstance(tried, list):
            raise damaged(path, f"{name} is no list of attempts")
        for i, attempt in enumerate(tried):
            _check_attempt(path, f"attempt {i} of {name}", attempt, {})
    return cells


def read_runs(path: Path) -> dict[str, dict[str, dict]]:
    """The runs of each cell of Table 4, by its name; none if there is no file."""
    cells = entries(path, "cells")
    for name, runs in cells.items():
        if not isinstance(runs, dict):
            raise damaged(path, f"{name} is no object of runs")
        for run, attempt in runs.items():
            _check_attempt(path, f"{run} of {name}", attempt, RUN)
    return cells


def entries(path: Path, key: str) -> dict[str, Any]:
    """The object at a key of a file of results; empty if there is no file."""
    try:
        content = json.loads(path.read_text()) if path.exists() else {key: {}}
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise damaged(path, f"it has no object {key!r}")
    return content[key]


def check_fields(path: Path, where: str, entry: Any, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if an entry of a file lacks what is wanted, or has it of another type."""
    if not isinstance(entry, dict):
        raise damaged(path, f"{where} is no object")
    for name, kind in wanted.items():
        if name not in entry:
            raise damaged(path, f"{where} has no {name!r}")
        if not isinstance(entry[name], kind):
            raise damaged(path, f"{where} has another type of {name!r}")


def _check_attempt(path: Path, where: str, attempt: Any, more: dict[str, Any]) -> None:
    check_fields(path, where, attempt, TRIED | more)
    if attempt["fits"]:
        check_fields(path, where, attempt, FITTING | {"seconds_source": str})


def damaged(path: Path, why: str) -> ValueError:
    """What is said of a file that cannot be gone on with."""
    return ValueError(f"{path} is no file of these results: {why}; delete it, or restore it: git checkout {path}")


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
                lines.append(
                    f"{name}: attempts of {'; '.join(sorted(others))} stand in the file, the compiler here is "
                    f"{now}: bytes and seconds may differ a little"
                )
    return lines
