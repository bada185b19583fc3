"""Files of compiled attempts for the tables: the attempts of each cell, by the cell's name; each attempt records its
compiler."""

import datetime
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.estimate.workloads.targets import MissingCompiler, Target, compiled_by, find_target
from ringformer.files.atomic import write_whole
from ringformer.files.json_text import parse_json
from ringformer.processes.software import revision

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
FITTING: dict[str, Any] = {
    "peak_bytes": NUMBER,
    "host_bytes": NUMBER,
    "step_seconds_model": NUMBER,
    "seconds_source": str,
}
FITTING |= dict.fromkeys(("hidden_permute_bytes", "exposed_permute_bytes", "exposed_in_ring_loops_bytes"), NUMBER)
"""Additional fields of an attempt that fits."""
RUN: dict[str, Any] = {
    "peak_bytes": NUMBER,
    "mesh_dim": str,
    "batch_size": int,
    "accumulate": int,
    "seconds_by_purpose": dict | None,
}
RUN |= dict.fromkeys(("step_seconds_model", "mfu_palm_model", "mfu_causal_model"), NUMBER | None)
"""Additional fields of a run of Table 4, whether it fits or not."""


class ResultFiles(NamedTuple):
    """Files of results of the paper's tables."""

    contexts: Path
    """Attempts of Table 3."""
    activations: Path
    """Activations of Table 1."""
    mfu: Path
    """Runs of Table 4."""
    trajectories: Path
    """Attempts of Table 5."""

    @staticmethod
    def beside(contexts: Path) -> "ResultFiles":
        """Return the results in the folder of Table 3's attempts."""
        return ResultFiles(
            contexts,
            contexts.with_name("activations.json"),
            contexts.with_name("table4.json"),
            contexts.with_name("table5.json"),
        )


def read(path: Path) -> defaultdict[str, list[dict[str, Any]]]:
    """Read the attempts of each cell of Table 3, by the cell's name; a cell that the file lacks has no attempts. Like
    every reader in this module, this raises ValueError for a damaged file."""
    return defaultdict(list, _read_cells(path, list, "a list of attempts", {}))


def read_runs(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Read the runs of each cell of Table 4, by the cell's name; empty if there is no file."""
    return _read_cells(path, dict, "an object of runs", RUN)


def _read_cells(path: Path, kind: Any, description: str, more: dict[str, Any]) -> dict[str, Any]:
    cells = entries(path, "cells")
    for name, tried in cells.items():
        if not isinstance(tried, kind):
            raise damaged(path, f"{name} is not {description}")
        if kind is list:
            tried = {f"attempt {i}": attempt for i, attempt in enumerate(tried)}
        for which, attempt in tried.items():
            where = f"{which} of {name}"
            check_fields(path, where, attempt, TRIED | more)
            if attempt["fits"]:
                check_fields(path, where, attempt, FITTING)
    return cells


def entries(path: Path, key: str) -> dict[str, Any]:
    """Read the object at a key of a file of results; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_text())
    except ValueError as error:
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


def damaged(path: Path, why: str) -> ValueError:
    """Return the error for a damaged file."""
    return ValueError(f"{path} is not a file of these results: {why}; delete it, or restore it: git checkout {path}")


def write_results(path: Path, **content: Any) -> None:
    """Replace a file of results as a whole. `content` has `what` the file holds, the `command` that fills it, and its
    entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def stamp(target: Target) -> dict[str, str]:
    """Return today's date, the commit of this code and the target's compiler, which every attempt records."""
    return {"date": datetime.date.today().isoformat(), "commit": revision(), "compiled_by": compiled_by(target)}


def compilable(cells: list[Any], log: Callable[[str], None]) -> list[Any]:
    """Return the cells for whose `target` the compiler is installed; log for each of the other targets what to
    install."""
    missing = {cell.target: find_target(cell.target).missing_compiler for cell in cells}
    for name, why in missing.items():
        if why:
            log(f"{name} is left out: {why}")
    return [cell for cell in cells if not missing[cell.target]]


def other_compilers(attempts: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Compare the compilers of attempts, given as (target, attempt), with the installed compilers. Return a line for
    each target that was compiled by another compiler."""
    compilers = defaultdict(set)
    for name, attempt in attempts:
        compilers[name].add(attempt["compiled_by"])
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
