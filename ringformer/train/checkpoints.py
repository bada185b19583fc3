"""Checkpoints of a run, by Orbax: the state in logical shapes and the step, in RUN_DIR/checkpoints/STEP.

Arrays are written without their padding (`sharded_arrays`) and may be restored onto any mesh. The batch is a function
of (seed, step), so the step is the whole position in the data.
"""

from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ringformer.checkpoint_arrays import Restore, Restored, Save, Saved, checkpoint_handler
from ringformer.train.state import TrainState, abstract_params, abstract_state

HF_CONFIG = "hf_config.json"
"""Beside a model that came from Hugging Face: its config.json there."""

CARRIED = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "chat_template.jinja", "generation_config.json")  # fmt: skip
"""Files of a Hugging Face checkpoint that stay beside the model, so that it can be exported as it came."""


def latest_step(run_dir: str | Path) -> int | None:
    """The step of a run's latest finished checkpoint; None if it has none."""
    folder = (Path(run_dir) / "checkpoints").absolute()
    return max(ocp.utils.checkpoint_steps(folder), default=None) if folder.is_dir() else None


class Checkpoints:
    """The checkpoints of one run, the latest `keep` of them (None: all). What is saved is read back, twice: every chunk
    before its checkpoint counts as finished, and what a restore would find as soon as it does.
    """

    def __init__(
        self, run_dir: Path, shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh,
        keep: int | None,
    ):  # fmt: skip
        self._run_dir, self._shardings = Path(run_dir), shardings
        self._target = abstract_state(shardings, optimizer, mesh)
        self._unchecked: int | None = None
        self._manager = ocp.CheckpointManager(
            (self._run_dir / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=keep),
            item_handlers=checkpoint_handler(),
        )  # fmt: skip

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Start writing; the state may be donated as soon as this returns. Raises OSError of the save before, as
        `close` does."""
        self._finish()
        saved = jax.tree.map(lambda x, w: Saved(x, w.shape), state, self._shardings)
        self._unchecked = int(state.step)
        self._manager.save(self._unchecked, args=Save(saved._asdict()))

    def restore(self, step: int) -> TrainState:
        """The state of `step`, laid out for this mesh. Raises ValueError if it is of another model."""
        arguments = _restored(self._target, self._shardings)._asdict()
        restored = self._manager.restore(step, args=Restore(arguments, restore_args=arguments))
        return TrainState(**restored)

    def close(self) -> None:
        """Wait for what is being written. Raises OSError if it cannot be read back."""
        try:
            self._finish()
        finally:
            self._manager.close()

    def _finish(self) -> None:
        self._manager.wait_until_finished()
        step, self._unchecked = self._unchecked, None
        if step is not None and jax.process_index() == 0:
            _check(self._run_dir, step, self._target, self._shardings)


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
    return (Path(run_dir) / "checkpoints" / str(step) / "default").absolute()


def restore_params(run_dir: str | Path, weights: dict, mesh: Mesh, dtypes: dict | None = None) -> Any:
    """The parameters alone of a run's latest checkpoint, or of a converted model, laid out for this mesh.

    `dtypes` says in which dtype each is read; None: float32.
    """
    abstract = abstract_params(weights, mesh)
    if dtypes is not None:
        abstract = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), abstract, dtypes)
    arguments = {"params": _restored(abstract, weights)}
    with ocp.Checkpointer(checkpoint_handler()) as checkpointer:
        restored = checkpointer.restore(
            latest_checkpoint(run_dir),
            Restore(arguments, restore_args=arguments, partial_restore=True),
        )
    return restored["params"]
