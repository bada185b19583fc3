"""Checkpoints of a run, written by Orbax: the state in logical shapes and the step, in RUN_DIR/checkpoints/STEP.

Arrays are written without their padding (`sharded_arrays.py`) and can be restored onto any mesh. A batch is a function
of (seed, step), so the step alone determines the position in the data. Before files are used, they are compared with
the hashes that were saved with them (`verify.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ringformer.checkpoints.array_folder import Restore, Save, cause_of, quiet, read_about
from ringformer.checkpoints.copies import Copies
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.saved_model import latest_step, restore_arguments
from ringformer.checkpoints.sharded_arrays import Saved, checkpoint_handler
from ringformer.checkpoints.verify import advising, restore_checked, restore_newest, saved_steps, tree_folder
from ringformer.files.manifest import DamagedFiles
from ringformer.files.run_layout import CHECKPOINTS

State = Any
"""NamedTuple of trees of arrays, one of which is the `step`."""


class Checkpoints:
    """Checkpoints of one run. A save is checked twice. Each chunk is read back before the checkpoint counts as
    finished; after that, the latest checkpoint and its arrays must be those that were saved.

    Args:
      target: the shapes, dtypes and shardings of a state, a NamedTuple with a `step`.
      shardings: the `WeightSharding` of each of its arrays.
      keep: selects the checkpoints that stay.
      copies: sends each checkpoint to an object store; None on all processes but process 0.
    """

    def __init__(self, run_dir: Path, target: State, shardings: State, keep: Keep, copies: Copies | None = None):
        self._run_dir = Path(run_dir)
        self._target = target
        self._shardings = shardings
        self._unchecked: int | None = None
        """Step of the save in progress."""
        self._failed = False
        self._keep = keep
        self._copies = copies
        self._handler = checkpoint_handler()
        quiet()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep, cleanup_tmp_directories=True, lightweight_initialize=True
        )
        self._manager = ocp.CheckpointManager(
            (self._run_dir / CHECKPOINTS).absolute(), options=options, item_handlers=self._handler
        )

    def restore_newest(self) -> tuple[int | None, State, list[str]]:
        """Return the step to continue from, its state, and lines to report; if there are no checkpoints: None, None and
        no lines. Damaged checkpoints are moved to RUN_DIR/damaged.

        Raises DamagedFiles if there are checkpoints but none of them is whole, and ValueError if they belong to another
        model.
        """
        newest = restore_newest(self._run_dir, self._restore)
        self._manager.reload()
        return newest

    def save(self, state: State, about: dict[str, Any] | None = None) -> None:
        """Start writing; the state may be donated as soon as this returns. Raises OSError if the previous save failed.

        Args:
          about: JSON values that describe the run at this step (`array_folder.read_about`).
        """
        self._finish()
        saved = jax.tree.map(lambda x, w: Saved(x, w.shape), state, self._shardings)
        self._unchecked = int(state.step)
        notes = {"step": self._unchecked} | (about or {})
        with self._failing():
            self._manager.save(self._unchecked, args=Save(saved._asdict(), notes))

    def check(self) -> None:
        """Raise OSError if the save in progress has failed, without waiting. Call this at every step."""
        with self._failing():
            if error := self._handler.leaves.failure:
                raise error
        if self._unchecked is not None and not self._manager.is_saving_in_progress():
            self._finish()
        if self._copies is not None:
            self._copies.check()

    def restore(self, step: int) -> State:
        """Return the state of `step`, laid out for this mesh. Raises ValueError if the state belongs to another model,
        and DamagedFiles if it differs from what was saved."""
        with advising(self._run_dir, step):
            return self._restore(step)

    def about(self, step: int) -> dict[str, Any]:
        """Return the values that were saved about the run with `step`; {} for a checkpoint without a manifest."""
        return read_about(tree_folder(self._run_dir, step)) or {}

    def way_back(self) -> str:
        """Return a sentence for a run that has diverged: it names the checkpoint to go back to, and says how to do
        that."""
        steps = sorted(self._manager.all_steps())
        proven = self._keep.proven(steps)
        if proven is None:
            return "No checkpoint is proven by sound steps after it" if steps else "There is no checkpoint"
        later = ", ".join(str(step) for step in steps if step > proven)
        move = f"move {later} out of {self._run_dir}/checkpoints and " if later else ""
        elsewhere = ", and another copy_to" if later and self._copies else ""
        return (
            f"The newest checkpoint that is proven by sound steps after it is step {proven}: to go back to it, "
            f"{move}start the same command, best with a lower optimizer.learning_rate (and "
            f"--allow=optimizer.learning_rate){elsewhere}"
        )

    def close(self) -> None:
        """Wait for the save in progress. Raises OSError if it fails; does not repeat the error of an earlier save."""
        if self._failed:
            if jax.process_count() == 1:  # other processes would not come to Orbax's barriers
                with suppress(Exception):
                    self._manager.close()
            return
        try:
            self._finish()
            if self._copies is not None:
                self._copies.close()
        finally:
            self._manager.close()

    def _restore(self, step: int) -> State:
        """Return the state of a checkpoint. Raises DamagedFiles, with a summary of the faults."""
        arguments = restore_arguments(self._target, self._shardings)._asdict()
        args = Restore(arguments, restore_args=arguments)
        tree = restore_checked(self._run_dir, step, self._handler, lambda: self._manager.restore(step, args=args))
        state = self._target._replace(**tree)
        actual = int(state.step)
        if actual != step:  # old checkpoints have no other record of their step
            raise DamagedFiles(f"{self._run_dir}/checkpoints/{step} holds step {actual}, under another name")
        return state

    def _finish(self) -> None:
        with self._failing():
            self._manager.wait_until_finished()
        step = self._unchecked
        self._unchecked = None
        if step is not None and jax.process_index() == 0:
            _check(self._run_dir, step, self._target, self._shardings)
            if self._copies is not None:
                self._copies.start(step, self._keep)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context that raises the error of a save as one line with the step, the cause, and the step to continue
        from."""
        try:
            yield
        except Exception as error:
            self._failed = True
            others = [step for step in saved_steps(self._run_dir) if step != self._unchecked]
            left = f"the run can go on from step {others[-1]}" if others else "there is no checkpoint before it"
            raise OSError(
                f"the checkpoint of step {self._unchecked} cannot be saved in {self._run_dir}/checkpoints "
                f"({cause_of(error)}); {left}"
            ) from error


def _check(run_dir: Path, step: int, target: State, shardings: State) -> None:
    """Raise OSError if a restore of the run would not find this step, or would not find the arrays that were saved."""
    latest = latest_step(run_dir)
    if latest != step:
        raise OSError(
            f"{run_dir}: step {step} was saved, but the latest checkpoint that can be found there is {latest}"
        )
    folder = tree_folder(run_dir, step)
    try:
        described = jax.tree.leaves(checkpoint_handler().metadata(folder).tree)
    except (ValueError, FileNotFoundError) as error:
        raise OSError(f"{folder} was saved, but cannot be read: {error}") from error
    stored = {array.name: (array.shape, array.dtype) for array in described}
    leaves = jax.tree.leaves_with_path(restore_arguments(target, shardings)._asdict())
    saved = {}
    for path, leaf in leaves:
        name = ".".join(ocp.tree.str_keypath(path))
        saved[name] = (leaf.logical_shape, leaf.array.dtype)
    names = saved.keys() | stored.keys()
    wrong = sorted(name for name in names if saved.get(name) != stored.get(name))
    if wrong:
        raise OSError(f"{folder} was saved, but does not hold what was: {', '.join(wrong)}")
