"""The programs of a run on its mesh: the same for training, for the evaluations inside it, and for estimates."""

from typing import NamedTuple

import optax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from ringformer.models.interface import ModelConfig
from ringformer.parallel.mesh import BATCH
from ringformer.parallel.parameters import abstract_model, shard_weights
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import TrainState, abstract_state, decayed, state_shardings
from ringformer.train.step import make_eval_step, make_train_step


class Program(NamedTuple):
    """A model on a mesh and the functions that train it; each compiles when it is first called."""

    model: ModelConfig
    """With the kernel and the chunks that these devices compute it with."""
    mesh: Mesh
    optimizer: optax.GradientTransformation
    shardings: TrainState
    """A `WeightSharding` for each array of the state."""
    step: Wrapped
    """The jitted train step, as `make_train_step` returns it."""
    eval_step: Wrapped
    """The jitted sums of an evaluation's batch, as `make_eval_step` returns it."""
    state: TrainState
    """Shapes, dtypes and shardings of the state."""
    batch_sharding: NamedSharding
    """The sharding of a batch's arrays [B, T]."""


def make_program(
    model: ModelConfig,
    mesh: Mesh,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    seq_len: int,
    accumulate: int = 1,
) -> Program:
    """Return the program that trains a model on a mesh with AdamW.

    Args:
      model: with its kernel (`models/kernel_choice.py`).
      steps: of the run, for the learning rate's schedule.
      seq_len: tokens of a sequence, for the evaluation's position buckets.
      accumulate: microbatches of a step, and of an evaluation's batch.
    """
    _, shapes, letters = abstract_model(model)
    transformation = make_optimizer(optimizer, steps, decayed(letters))
    shardings = state_shardings(shard_weights(shapes, letters, mesh), transformation)
    step = make_train_step(
        model,
        transformation,
        shardings,
        mesh,
        clip_norm=optimizer.clip_norm,
        accumulate=accumulate,
        skip_spikes=optimizer.skip_spikes > 0,
    )
    eval_step = make_eval_step(model, shardings.params, mesh, seq_len=seq_len, accumulate=accumulate)
    state = abstract_state(shardings, transformation, mesh)
    return Program(model, mesh, transformation, shardings, step, eval_step, state, NamedSharding(mesh, BATCH))
