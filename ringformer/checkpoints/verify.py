"""Verify that a run's checkpoints are what was written, and restore the newest that is. Processes share the work.

RUN_DIR/checkpoints/STEP/default/    the tree, with its manifest
RUN_DIR/damaged/STEP/                a damaged checkpoint, moved there when the run went on from an older one

A restore reads the files of arrays once: what is compared with the manifest is what is decoded (`zarr_files.py`). All
processes have the same verdict on what each of them read, and act on it together.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ringformer.checkpoints.array_folder import PlainFiles, read_about, tree_faults
from ringformer.files.manifest import DamagedFiles
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.processes.agreement import tell_all

T = TypeVar("T")
REPORT_BYTES = 4096
"""Bytes in which a process reports faults to the others."""
UNVERIFIED = "was saved before checkpoints had hashes: whether it is whole cannot be verified"


def saved_steps(run_dir: str | Path) -> list[int]:
    """The steps of a run's finished checkpoints, in order."""
    folder = (Path(run_dir) / CHECKPOINTS).absolute()
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def tree_folder(run_dir: str | Path, step: int) -> Path:
    """The folder with the arrays of a checkpoint."""
    return (Path(run_dir) / CHECKPOINTS / str(step) / "default").absolute()


def checkpoint_faults(
    run_dir: str | Path, step: int, wanted: Callable[[str], bool] = lambda name: True, *, chunks: bool = True
) -> list[str] | None:
    """Files of a checkpoint that are not as they were written, a line each; None if it has no hashes.

    All processes call it; each reads a share of the files, and all return the same.

    Args:
      wanted: which arrays to check, by their names ("params.embed").
      chunks: whether to read the arrays' chunks; if not, only their sizes are compared.
    """
    folder = tree_folder(run_dir, step)
    faults = tree_faults(folder, wanted, (jax.process_index(), jax.process_count()), chunks=chunks)
    return _all_faults(misnamed(folder, step) if faults == [] else faults)


def restore_checked(
    run_dir: str | Path,
    step: int,
    handler: PlainFiles,
    restore: Callable[[], Any],
    wanted: Callable[[str], bool] = lambda name: True,
) -> tuple[list[str] | None, Any]:
    """The faults of a checkpoint, as `checkpoint_faults` returns them, and what `restore` returns of it by `handler`;
    None if there are faults.

    The chunks are compared as they are read, everything else before. All processes call it, and return the same faults.
    """
    faults = checkpoint_faults(run_dir, step, wanted, chunks=False)
    if faults:
        return faults, None
    try:
        restored = restore()
    except (OSError, ValueError):
        # If there are several processes, the others wait at Orbax's barriers.
        if jax.process_count() == 1 and (changed := checkpoint_faults(run_dir, step, wanted, chunks=False)):
            return changed, None
        raise
    met = _all_faults(handler.leaves.faults)
    return (met, None) if met else (faults, restored)


def misnamed(folder: Path, step: int) -> list[str]:
    """Return a line describing the fault if a tree was saved at another step; a read error is returned too rather than
    raised, because the other processes wait for this one."""
    try:
        held = (read_about(folder) or {}).get("step", step)
    except DamagedFiles as error:
        return [str(error)]
    return [] if held == step else [f"{folder.parent} holds step {held}, under another name"]


def restore_newest(
    run_dir: str | Path, restore: Callable[[int], tuple[list[str] | None, T]]
) -> tuple[int | None, T | None, list[str]]:
    """The newest whole checkpoint: its step, what `restore` returns of it, and lines to report; None, None if there are
    no checkpoints.

    Newer ones, which are damaged, are moved to RUN_DIR/damaged. Raises DamagedFiles if there are checkpoints, and none
    of them is whole; then nothing is moved.

    Args:
      restore: restores the checkpoint of a step, and returns its faults first, as `restore_checked` does.
    """
    steps, damaged = saved_steps(run_dir), {}
    for step in reversed(steps):
        faults, restored = restore(step)
        if not faults:
            break
        damaged[step] = summary(faults)
    else:
        if steps:
            each = "; ".join(f"step {step}: {fault}" for step, fault in damaged.items())
            raise DamagedFiles(f"{run_dir}: no checkpoint is whole ({each}); bring one back, or choose another run_dir")
        return None, None, []
    lines = [
        f"the checkpoint of step {broken} is damaged ({fault}): it is in {_set_aside(Path(run_dir), broken)} now, and "
        f"the run goes on from step {step}"
        for broken, fault in damaged.items()
    ]
    if faults is None:
        lines.append(f"the checkpoint of step {step} {UNVERIFIED}")
    return step, restored, lines


def refuse_damaged(run_dir: str | Path, step: int, faults: list[str] | None) -> str:
    """Raise DamagedFiles, naming the files, if a checkpoint has faults; else return a line to report, "" if there is
    nothing to report."""
    if faults is None:
        return f"the checkpoint of step {step} in {run_dir} {UNVERIFIED}"
    if faults:
        older = [other for other in saved_steps(run_dir) if other < step]
        way = (
            f"move {tree_folder(run_dir, step).parent} away to take that of step {older[-1]}"
            if older
            else "bring it back from a copy"
        )
        raise DamagedFiles(f"the checkpoint of step {step} is damaged ({summary(faults)}): {way}")
    return ""


def summary(faults: list[str]) -> str:
    """The first fault, and the number of others."""
    return faults[0] + (f", and {len(faults) - 1} more" if len(faults) > 1 else "")


def _set_aside(run_dir: Path, step: int) -> Path:
    """Move a checkpoint to RUN_DIR/damaged; return its new place."""
    aside, again = run_dir / "damaged" / str(step), 1
    while aside.exists():
        again += 1
        aside = aside.with_name(f"{step}-{again}")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"to be set aside: {step}")  # all processes have the same name for it
    if jax.process_index() == 0:
        aside.parent.mkdir(exist_ok=True)
        tree_folder(run_dir, step).parent.rename(aside)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"set aside: {step}")
    return aside


def _all_faults(faults: list[str] | None) -> list[str] | None:
    """Return the faults that any process has; None if no process has faults and one of them cannot tell. A
    collective."""
    if jax.process_count() == 1:
        return faults
    reports = [json.loads(report) for report in tell_all(_report(faults), REPORT_BYTES)]
    lines = [line for report in reports for line in report or ()]
    return list(dict.fromkeys(lines)) if lines or None not in reports else None


def _report(faults: list[str] | None) -> bytes:
    """Return the JSON of as many faults as there is room for."""
    while len(report := json.dumps(faults).encode()) > REPORT_BYTES:
        assert faults is not None
        faults = faults[: len(faults) // 2] or [faults[0][: REPORT_BYTES // 8]]
    return report
