"""Verify that a run's checkpoints are as they were written, and restore the newest whole one. Processes share the work.

RUN_DIR/checkpoints/STEP/default/    the tree, with its manifest
RUN_DIR/damaged/STEP/                a damaged checkpoint, moved there when the run resumed from an older one

A restore reads the files of arrays only once: the bytes that it decodes are the bytes that it compared with the
manifest (`zarr_files.py`). All processes exchange their findings, reach the same verdict and act on it together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp

from ringformer.checkpoints.array_folder import PlainFiles, read_about, tree_faults
from ringformer.files.manifest import MANIFEST, DamagedFiles
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.processes.agreement import from_all, from_process_0

T = TypeVar("T")
REPORTED = 20
"""Largest number of faults that a process reports to the others."""
UNVERIFIED = "was saved before checkpoints had hashes: whether it is whole cannot be verified"


def saved_steps(run_dir: str | Path) -> list[int]:
    """Return the steps of a run's finished checkpoints, in order."""
    folder = (Path(run_dir) / CHECKPOINTS).absolute()
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def tree_folder(run_dir: str | Path, step: int) -> Path:
    """Return the folder with the arrays of a checkpoint."""
    return (Path(run_dir) / CHECKPOINTS / str(step) / "default").absolute()


def checkpoint_faults(
    run_dir: str | Path, step: int, wanted: Callable[[str], bool] = lambda name: True, *, chunks: bool = True
) -> list[str] | None:
    """Return a line for each file of a checkpoint that differs from what was written; None if it has no hashes.

    All processes call this function; each reads a share of the files, and all return the same lines.

    Args:
      wanted: returns True for the names of arrays to check ("params.embed").
      chunks: True to read the chunks of arrays; otherwise only their sizes are compared.
    """
    folder = tree_folder(run_dir, step)
    faults = tree_faults(folder, wanted, (jax.process_index(), jax.process_count()), chunks=chunks)
    if faults == []:
        try:
            saved = (read_about(folder) or {}).get("step", step)
            if saved != step:
                faults = [f"{folder.parent} holds step {saved}, under another name"]
        except DamagedFiles as error:  # not raised: the other processes wait for this one
            faults = [str(error)]
    return shared_faults(faults)


def restore_checked(
    run_dir: str | Path,
    step: int,
    handler: PlainFiles,
    restore: Callable[[], T],
    wanted: Callable[[str], bool] = lambda name: True,
) -> T:
    """Return the result of `restore`, which reads a checkpoint with `handler`, as `restore_compared` does.

    Args:
      wanted: as for `checkpoint_faults`.
    """
    return restore_compared(lambda: checkpoint_faults(run_dir, step, wanted, chunks=False), handler, restore)


def restore_compared(find_faults: Callable[[], list[str] | None], handler: PlainFiles, restore: Callable[[], T]) -> T:
    """Return the result of `restore`, which reads a saved tree with `handler`. All processes call this function.

    Raises DamagedFiles on all processes, with a summary of the faults, if a file differs from what was written: chunks
    are compared as they are read, all other files before that, by `find_faults`, which returns the same lines on all
    processes.
    """

    def check(faults: list[str] | None) -> None:
        if faults:
            raise DamagedFiles(summary(faults))

    check(find_faults())
    try:
        restored = restore()
    except (OSError, ValueError):
        if jax.process_count() == 1:  # other processes would wait at Orbax's barriers
            check(find_faults())
        raise
    check(shared_faults(handler.leaves.faults))
    return restored


def restore_newest(run_dir: str | Path, restore: Callable[[int], T]) -> tuple[int | None, T | None, list[str]]:
    """Return the step of the newest whole checkpoint, the result of `restore`, and lines to report; if there are no
    checkpoints: None, None and no lines.

    Damaged checkpoints of later steps are moved to RUN_DIR/damaged. Raises DamagedFiles, and moves nothing, if there
    are checkpoints but none of them is whole.

    Args:
      restore: restores the checkpoint of a step, or raises DamagedFiles, as `restore_checked` does.
    """
    damaged: dict[int, DamagedFiles] = {}
    for step in reversed(saved_steps(run_dir)):
        try:
            restored = restore(step)
        except DamagedFiles as error:
            damaged[step] = error
            continue
        lines = []
        for broken, fault in damaged.items():
            aside = _set_aside(Path(run_dir), broken)
            lines.append(
                f"the checkpoint of step {broken} is damaged ({fault}): it is in {aside} now, and the run goes on from "
                f"step {step}"
            )
        return step, restored, lines + unverified(run_dir, step)
    if damaged:
        each = "; ".join(f"step {step}: {error}" for step, error in damaged.items())
        raise DamagedFiles(f"{run_dir}: no checkpoint is whole ({each}); bring one back, or choose another run_dir")
    return None, None, []


def unverified(run_dir: str | Path, step: int) -> list[str]:
    """Return a line to report about a checkpoint if it has no hashes; otherwise no line."""
    if (tree_folder(run_dir, step) / MANIFEST).exists():
        return []
    return [f"the checkpoint of step {step} in {run_dir} {UNVERIFIED}"]


@contextmanager
def advising(run_dir: str | Path, step: int) -> Iterator[None]:
    """Context that adds the step of the checkpoint, and what to do about it, to a DamagedFiles error."""
    try:
        yield
    except DamagedFiles as error:
        older = [other for other in saved_steps(run_dir) if other < step]
        advice = "bring it back from a copy"
        if older:
            advice = f"move {tree_folder(run_dir, step).parent} away to take that of step {older[-1]}"
        raise DamagedFiles(f"the checkpoint of step {step} is damaged ({error}): {advice}") from error


def summary(faults: list[str]) -> str:
    """Return the first fault, and the number of others."""
    if len(faults) == 1:
        return faults[0]
    return f"{faults[0]}, and {len(faults) - 1} more"


def _set_aside(run_dir: Path, step: int) -> str:
    """Move a checkpoint to RUN_DIR/damaged, on process 0; return its new place, on all processes."""
    aside = run_dir / "damaged" / str(step)
    again = 1
    if jax.process_index() == 0:
        while aside.exists():
            again += 1
            aside = aside.with_name(f"{step}-{again}")
        aside.parent.mkdir(exist_ok=True)
        tree_folder(run_dir, step).parent.rename(aside)
    return from_process_0(str(aside))


def shared_faults(faults: list[str] | None) -> list[str] | None:
    """Return the faults that any process found; None if the files have no hashes and no process found a fault. All
    processes call this function."""
    if jax.process_count() == 1:
        return faults
    reports = from_all(faults and faults[:REPORTED])
    lines: list[str] = []
    for report in reports:
        lines += report or ()
    if not lines and None in reports:
        return None
    return list(dict.fromkeys(lines))
