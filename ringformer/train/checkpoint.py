"""Checkpoints of a run, by Orbax: the logical state and the step, in RUN_DIR/checkpoints/STEP.

Arrays are written in their logical, unpadded shapes and may be restored onto any mesh. The batch is a function of
(seed, step), so the step is the whole position in the data.
"""

from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ringformer.train.state import TrainState, abstract_logical, abstract_logical_params, from_logical, to_logical

HF_CONFIG = "hf_config.json"
"""Beside a model that came from Hugging Face: its config.json there."""

CARRIED = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "chat_template.jinja", "generation_config.json")  # fmt: skip
"""Files of a Hugging Face checkpoint that stay beside the model, so that it can be exported as it came."""

CHUNK_BYTES = 64 * 2**20


def latest_step(run_dir: str | Path) -> int | None:
    """The step of a run's latest finished checkpoint; None if it has none."""
    folder = (Path(run_dir) / "checkpoints").absolute()
    return max(ocp.utils.checkpoint_steps(folder), default=None) if folder.is_dir() else None


class Checkpoints:
    """The checkpoints of one run, the latest `keep` of them (None: all)."""

    def __init__(
        self, run_dir: Path, shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh,
        keep: int | None,
    ):  # fmt: skip
        self._shardings, self._optimizer, self._mesh = shardings, optimizer, mesh
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager((Path(run_dir) / "checkpoints").absolute(), options=options)

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Start writing; the state may be donated as soon as this returns."""
        logical = to_logical(state, self._shardings, self._mesh)
        # Chunks of few layers: a reader of one layer need not decode them all.
        chunks = jax.tree.map(
            lambda x: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if x.ndim else ()), logical._asdict()
        )
        self._manager.save(int(state.step), args=ocp.args.StandardSave(logical._asdict(), save_args=chunks))

    def restore(self, step: int) -> TrainState:
        """The state of `step`, laid out for this mesh."""
        target = abstract_logical(self._shardings, self._optimizer, self._mesh)._asdict()
        logical = TrainState(**self._manager.restore(step, args=ocp.args.StandardRestore(target)))
        # Donation later on must not meet buffers that Orbax shares with its own cache.
        return from_logical(jax.block_until_ready(logical), self._shardings, self._mesh)

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def latest_checkpoint(run_dir: str | Path) -> Path:
    """The folder of a run's latest checkpoint. Raises FileNotFoundError if there is none."""
    step = latest_step(run_dir)
    if step is None:
        raise FileNotFoundError(f"{run_dir}: there is no checkpoint in this folder")
    return (Path(run_dir) / "checkpoints" / str(step) / "default").absolute()


def restore_params(run_dir: str | Path, weights: dict, mesh: Mesh) -> Any:
    """The parameters alone of a run's latest checkpoint, or of a converted model, float32, laid out for this mesh."""
    target = {"params": abstract_logical_params(weights, mesh)}
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(
            latest_checkpoint(run_dir), ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=True)
        )
    return from_logical(jax.block_until_ready(found["params"]), weights, mesh)
