"""Checkpoints of a run, by Orbax: the state in logical shapes and the step, in RUN_DIR/checkpoints/STEP.

Arrays are written without their padding (`checkpoint_arrays`) and may be restored onto any mesh. The batch is a
function of (seed, step), so the step is the whole position in the data. What is read is compared first with the hashes
that were saved with it (`checkpoint_integrity`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ringformer.checkpoint_arrays import Restored, Saved, checkpoint_handler
from ringformer.checkpoint_tree import Restore, Save, read_about
from ringformer.file_manifest import DamagedFiles
from ringformer.train.checkpoint_copies import Copies
from ringformer.train.checkpoint_integrity import check_checkpoint, newest_whole, saved_steps, tree_folder
from ringformer.train.keep_policy import Keep
from ringformer.train.orbax_errors import cause, quiet
from ringformer.train.state import TrainState, abstract_params, abstract_state

HF_CONFIG = "hf_config.json"
"""Beside a model that came from Hugging Face: its config.json there."""

CARRIED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a Hugging Face checkpoint that stay beside the model, so that it can be exported as it came."""


def latest_step(run_dir: str | Path) -> int | None:
    """The step of a run's latest finished checkpoint; None if it has none."""
    return max(saved_steps(run_dir), default=None)


class Checkpoints:
    """The checkpoints of one run, those that `keep` says. What is saved is read back, twice: every chunk before its
    checkpoint counts as finished, and what a restore would find as soon as it does. Then `copies`, of process 0, sends
    it elsewhere.
    """

    def __init__(
        self,
        run_dir: Path,
        shardings: TrainState,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        keep: Keep,
        copies: Copies | None = None,
    ):
        self._run_dir, self._shardings = Path(run_dir), shardings
        self._target = abstract_state(shardings, optimizer, mesh)
        self._unchecked: int | None = None
        self._verified: int | None = None
        self._failed = False
        self._keep, self._copies = keep, copies
        self._handler = checkpoint_handler()
        quiet()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep.policy(), cleanup_tmp_directories=True, lightweight_initialize=True
        )
        self._manager = ocp.CheckpointManager(
            (self._run_dir / "checkpoints").absolute(), options=options, item_handlers=self._handler
        )

    def newest_whole(self) -> tuple[int | None, list[str]]:
        """The step to go on from, None at the beginning, and what there is to say: of damaged checkpoints, which are
        moved to RUN_DIR/damaged. Raises DamagedFiles if there are checkpoints, and none of them is whole."""
        self._verified, said = newest_whole(self._run_dir)
        self._manager.reload()
        return self._verified, said

    def save(self, state: TrainState, about: dict[str, Any] | None = None) -> None:
        """Start writing; the state may be donated as soon as this returns. Raises OSError of the save before, as
        `close` does.

        Args:
          about: what is to be known of the run at this step, as JSON has it (`checkpoint_tree.read_about`).
        """
        self._finish()
        saved = jax.tree.map(lambda x, w: Saved(x, w.shape), state, self._shardings)
        self._unchecked = int(state.step)
        with self._failing():
            self._manager.save(self._unchecked, args=Save(saved._asdict(), {"step": self._unchecked, **(about or {})}))

    def check(self) -> None:
        """Raise OSError if what is being written has failed; to be asked at every step, does not wait."""
        with self._failing():
            if error := self._handler.leaves.failure:
                raise error
        if self._unchecked is not None and not self._manager.is_saving_in_progress():
            self._finish()
        if self._copies is not None:
            self._copies.check()

    def restore(self, step: int) -> TrainState:
        """The state of `step`, laid out for this mesh. Raises ValueError if it is of another model, DamagedFiles if it
        is not as it was saved."""
        if step != self._verified:
            check_checkpoint(self._run_dir, step)
        arguments = _restored(self._target, self._shardings)._asdict()
        restored = TrainState(**self._manager.restore(step, args=Restore(arguments, restore_args=arguments)))
        if (found := int(restored.step)) != step:
            raise DamagedFiles(f"{self._run_dir}/checkpoints/{step} holds step {found}: move it away, it is a copy")
        return restored

    def about(self, step: int | None) -> dict[str, Any]:
        """What was said of the run when `step` was saved; nothing of None, and of checkpoints of before."""
        return {} if step is None else read_about(tree_folder(self._run_dir, step)) or {}

    def way_back(self) -> str:
        """Which checkpoint to go back to when the run has diverged, and how; a sentence."""
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
        """Wait for what is being written. Raises OSError if it cannot be read back; what failed before is over."""
        if self._failed:
            if jax.process_count() == 1:  # of several, the others will not come to Orbax's barriers
                with suppress(Exception):
                    self._manager.close()
            return
        try:
            self._finish()
            if self._copies is not None:
                self._copies.close()
        finally:
            self._manager.close()

    def _finish(self) -> None:
        with self._failing():
            self._manager.wait_until_finished()
        step, self._unchecked = self._unchecked, None
        if step is not None and jax.process_index() == 0:
            _check(self._run_dir, step, self._target, self._shardings)
        if step is not None and self._copies is not None:
            self._copies.start(step, self._keep)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong in a save, as one line: the step, the cause, and what is there to go on from."""
        try:
            yield
        except Exception as error:
            self._failed = True
            others = [step for step in saved_steps(self._run_dir) if step != self._unchecked]
            left = f"the run can go on from step {others[-1]}" if others else "there is no checkpoint before it"
            raise OSError(
                f"the checkpoint of step {self._unchecked} cannot be saved in {self._run_dir}/checkpoints "
                f"({cause(error)}); {left}"
            ) from error


def _check(run_dir: Path, step: int, target: TrainState, shardings: TrainState) -> None:
    """Raise OSError if a restore of the run would not find this step, or not the arrays that were saved."""
    if (latest := latest_step(run_dir)) != step:
        raise OSError(
            f"{run_dir}: step {step} was saved, but the latest checkpoint that can be found there is {latest}"
        )
    folder = latest_checkpoint(run_dir)
    try:
        described = jax.tree.leaves(checkpoint_handler().metadata(folder).tree)
    except (ValueError, FileNotFoundError) as error:
        raise OSError(f"{folder} was saved, but cannot be read: {error}") from error
    stored = {array.name: (array.shape, array.dtype) for array in described}
    leaves = jax.tree.leaves_with_path(_restored(target, shardings)._asdict())
    saved = {".".join(ocp.tree.str_keypath(path)): (leaf.logical_shape, leaf.array.dtype) for path, leaf in leaves}
    if wrong := [name for name in saved.keys() | stored.keys() if saved.get(name) != stored.get(name)]:
        raise OSError(f"{folder} was saved, but does not hold what was: {', '.join(sorted(wrong))}")


def _restored(target, shardings):
    """The arguments that restore a tree of abstract arrays."""
    return jax.tree.map(lambda x, w: Restored(array=x, logical_shape=w.shape), target, shardings)


def latest_checkpoint(run_dir: str | Path) -> Path:
    """The folder of a run's latest checkpoint. Raises FileNotFoundError if there is none."""
    step = latest_step(run_dir)
    if step is None:
        raise FileNotFoundError(f"{run_dir}: there is no checkpoint in this folder")
    return tree_folder(run_dir, step)


def restore_params(run_dir: str | Path, weights: dict, mesh: Mesh, dtypes: dict | None = None) -> Any:
    """The parameters alone of a run's latest checkpoint, or of a converted model, laid out for this mesh.

    `dtypes` says in which dtype each is read; None: float32. Raises DamagedFiles, naming the files, if they are not as
    they were written.
    """
    folder = latest_checkpoint(run_dir)
    said = check_checkpoint(run_dir, int(folder.parent.name), lambda name: name.startswith("params."))
    if said and jax.process_index() == 0:
        print(said, file=sys.stderr)
    abstract = abstract_params(weights, mesh)
    if dtypes is not None:
        abstract = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), abstract, dtypes)
    arguments = {"params": _restored(abstract, weights)}
    with ocp.Checkpointer(checkpoint_handler()) as checkpointer:
        restored = checkpointer.restore(
            folder,
            Restore(arguments, restore_args=arguments, partial_restore=True),
        )
    return restored["params"]
