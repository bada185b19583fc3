"""Checkpoints of a run, by Orbax: the logical state and the step, in RUN_DIR/checkpoints/STEP.

Arrays are written in their logical, unpadded shapes and may be restored onto any mesh. The batch is a function of
(seed, step), so the step is the whole position in the data.
"""

from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ringformer.train.state import TrainState, abstract_logical, from_logical, to_logical


def latest_step(run_dir: str | Path) -> int | None:
    """The step of a run's latest finished checkpoint; None if it has none."""
    folder = (Path(run_dir) / "checkpoints").absolute()
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=None)


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
        self._manager.save(int(state.step), args=ocp.args.StandardSave(logical._asdict()))

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
