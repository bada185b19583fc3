"""Whether a run's checkpoints are what was written, and which is the newest that is. Processes share the work.

RUN_DIR/checkpoints/STEP/default/    the tree, with its manifest
RUN_DIR/damaged/STEP/                a checkpoint that was found damaged when the run went on from an older one
"""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ringformer.checkpoints.tree import read_about, tree_faults
from ringformer.files.manifest import DamagedFiles
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.processes.agreement import tell_all

SAID_BYTES = 4096
"""What a process tells the others of what it found."""
UNVERIFIED = "was saved before checkpoints had hashes: whether it is whole cannot be verified"


def saved_steps(run_dir: str | Path) -> list[int]:
    """The steps of a run's finished checkpoints, in order."""
    folder = (Path(run_dir) / CHECKPOINTS).absolute()
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def tree_folder(run_dir: str | Path, step: int) -> Path:
    """Where the arrays of a checkpoint are."""
    return (Path(run_dir) / CHECKPOINTS / str(step) / "default").absolute()


def checkpoint_faults(
    run_dir: str | Path, step: int, wanted: Callable[[str], bool] = lambda name: True
) -> list[str] | None:
    """What of a checkpoint's files is not as it was written, a line each; None if there are no hashes to tell.

    All processes call it, each hashes a share of the files, and all have the same answer.

    Args:
      wanted: of the arrays, by their names ("params.embed"), those to be looked at.
    """
    folder = tree_folder(run_dir, step)
    faults = tree_faults(folder, wanted, (jax.process_index(), jax.process_count()))
    if faults == []:
        faults = misnamed(folder, step)
    if jax.process_count() == 1:
        return faults
    told = [json.loads(said) for said in tell_all(_told(faults), SAID_BYTES)]
    found = [line for lines in told for line in lines or ()]
    return list(dict.fromkeys(found)) if found or None not in told else None


def misnamed(folder: Path, step: int) -> list[str]:
    """Whether a tree was saved at another step. An error is a fault too: the others wait for this process's word."""
    try:
        held = (read_about(folder) or {}).get("step", step)
    except DamagedFiles as error:
        return [str(error)]
    return [] if held == step else [f"{folder.parent} holds step {held}, under another name"]


def newest_whole(run_dir: str | Path) -> tuple[int | None, list[str]]:
    """The step of the newest checkpoint that is whole, and what there is to say; None if there are no checkpoints.

    Newer ones, which are damaged, are moved to RUN_DIR/damaged. Raises DamagedFiles if there are checkpoints, and none
    of them is whole; then nothing is moved.
    """
    steps, damaged = saved_steps(run_dir), {}
    said: list[str] = []
    for step in reversed(steps):
        faults = checkpoint_faults(run_dir, step)
        if not faults:
            break
        damaged[step] = summary(faults)
    else:
        if steps:
            each = "; ".join(f"step {step}: {fault}" for step, fault in damaged.items())
            raise DamagedFiles(f"{run_dir}: no checkpoint is whole ({each}); bring one back, or choose another run_dir")
        return None, []
    for broken, fault in damaged.items():
        aside = _set_aside(Path(run_dir), broken)
        said.append(
            f"the checkpoint of step {broken} is damaged ({fault}): it is in {aside} now, and the run goes on "
            f"from step {step}"
        )
    if faults is None:
        said.append(f"the checkpoint of step {step} {UNVERIFIED}")
    return step, said


def check_checkpoint(run_dir: str | Path, step: int, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """What there is to say of a checkpoint that is to be read: nothing if it is whole. Raises DamagedFiles, naming the
    files, if it is not. `wanted` as in `checkpoint_faults`."""
    faults = checkpoint_faults(run_dir, step, wanted)
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
    """The first of the faults, and how many others there are."""
    return faults[0] + (f", and {len(faults) - 1} more" if len(faults) > 1 else "")


def _set_aside(run_dir: Path, step: int) -> Path:
    """Move a checkpoint to RUN_DIR/damaged; where it is then."""
    aside, again = run_dir / "damaged" / str(step), 1
    while aside.exists():
        again += 1
        aside = aside.with_name(f"{step}-{again}")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"to be set aside: {step}")  # all have the same name for it
    if jax.process_index() == 0:
        aside.parent.mkdir(exist_ok=True)
        tree_folder(run_dir, step).parent.rename(aside)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"set aside: {step}")
    return aside


def _told(faults: list[str] | None) -> bytes:
    """JSON of the faults, of as many as there is room for."""
    while len(said := json.dumps(faults).encode()) > SAID_BYTES:
        assert faults is not None
        faults = faults[: len(faults) // 2] or [faults[0][: SAID_BYTES // 8]]
    return said
