"""Files of compiled attempts for the tables: the attempts of each cell by its name, each with its compiler."""

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
"""Fields of every attempt, with their types."""
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
"""Additional fields of an attempt that fits."""
RUN = {"peak_bytes": NUMBER, "mesh_dim": str, "batch_size": int, "accumulate": int, "seconds_by_purpose": dict | None}
RUN |= dict.fromkeys(("step_seconds_model", "mfu_palm_model", "mfu_causal_model"), NUMBER | None)
"""Additional fields of a run of Table 4, whether it fits or not."""


def read(path: Path) -> dict[str, list[dict]]:
    """Read the attempts of each cell of Table 3 by its name; empty if there is no file. Like every reader in this
    module, it raises ValueError for a damaged file."""
    cells = entries(path, "cells")
    for name, tried in cells.items():
        if not isinstance(tried, list):
            raise damaged(path, f"{name} is not a list of attempts")
        for i, attempt in enumerate(tried):
            _check_attempt(path, f"attempt {i} of {name}", attempt, {})
    return cells


def read_runs(path: Path) -> dict[str, dict[str, dict]]:
    """Read the runs of each cell of Table 4 by its name; empty if there is no file."""
    cells = entries(path, "cells")
    for name, runs in cells.items():
        if not isinstance(runs, dict):
            raise damaged(path, f"{name} is not an object of runs")
        for run, attempt in runs.items():
            _check_attempt(path, f"{run} of {name}", attempt, RUN)
    return cells


def entries(path: Path, key: str) -> dict[str, Any]:
    """Read the object at a key of a file of results; empty if there is no file."""
    try:
        content = json.loads(path.read_text()) if path.exists() else {key: {}}
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise damaged(path, f"it has no object {key!r}")
    return content[key]


def check_fields(path: Path, where: str, entry: Any, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if an entry of a file lacks a required field or has another type."""
    if not isinstance(entry, dict):
        raise damaged(path, f"{where} is not an object")
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
    """Return the error for a damaged file."""
    return ValueError(f"{path} is not a file of these results: {why}; delete it, or restore it: git checkout {path}")


def write_cells(path: Path, about: str, command: str, results: Mapping[str, Any]) -> None:
    """Write the cells for `read`, with a description and the command that fills them. The file is replaced as a
    whole."""
    content = {"what": about, "command": command, "cells": dict(sorted(results.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def stamp(target: Target) -> dict[str, str]:
    """Return today's date and the target's compiler, which every attempt records."""
    return {"date": datetime.date.today().isoformat(), "compiled_by": compiled_by(target)}


def installed(targets: Iterable[str], log: Callable[[str], None]) -> set[str]:
    """Return the names of the targets whose compiler is installed; log for each of the others what to install."""
    missing = {name: find_target(name).missing_compiler for name in dict.fromkeys(targets)}
    for name, why in missing.items():
        if why:
            log(f"{name} is left out: {why}")
    return {name for name, why in missing.items() if not why}


def other_compilers(attempts: Iterable[tuple[str, dict]]) -> list[str]:
    """Return a line for each target with attempts by another compiler than the installed one, from pairs of both."""
    compilers: dict[str, set[str]] = {}
    for name, attempt in attempts:
        compilers.setdefault(name, set()).add(attempt["compiled_by"])
    lines = []
    for name, before in compilers.items():
        with suppress(MissingCompiler):
            now = compiled_by(find_target(name))
            if others := before - {now}:
                lines.append(
                    f"{name}: the file has attempts by {'; '.join(sorted(others))}, the installed compiler is {now}: "
                    "bytes and seconds may differ a little"
                )
    return lines
