"""Programs of a run on its mesh: training, evaluations and estimates use the same programs."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from ringformer.models.interface import ModelConfig
from ringformer.parallel.mesh import BATCH
from ringformer.parallel.parameters import abstract_model, shard_weights
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import TrainState, abstract_state, state_shardings
from ringformer.train.step import make_eval_step, make_train_step


class Program(NamedTuple):
    """Model on a mesh and the functions that train it; each function is compiled when it is first called."""

    model: ModelConfig
    """Model with the kernel and chunks for these devices."""
    mesh: Mesh
    optimizer: optax.GradientTransformation
    shardings: TrainState
    """A `WeightSharding` for each array of the state."""
    step_on: Callable[[int], Wrapped]
    """Function that returns the jitted train step on so many rings, from `make_train_step`."""
    eval_step: Wrapped
    """Jitted function that sums the losses of one batch of an evaluation, from `make_eval_step`."""
    state: TrainState
    """Shapes, dtypes and shardings of the state."""
    batch_sharding: NamedSharding
    """Sharding of a batch's arrays [B, T]."""

    @property
    def step(self) -> Wrapped:
        """Jitted train step on one ring of all ranks."""
        return self.step_on(1)


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
      model: model with its kernel (`models/kernel_choice.py`).
      steps: steps of the run, for the learning-rate schedule.
      seq_len: tokens in a sequence, for the evaluation's position buckets.
      accumulate: microbatches in a step and in an evaluation's batch.
    """
    _, shapes, letters = abstract_model(model)
    transformation = make_optimizer(optimizer, steps, letters)
    shardings = state_shardings(shard_weights(shapes, letters, mesh), transformation)

    options: dict[str, Any] = {"clip_norm": optimizer.clip_norm, "skip_spikes": optimizer.skip_spikes > 0}
    options |= {"accumulate": accumulate}
    step_on = lru_cache(lambda rings: make_train_step(model, transformation, shardings, mesh, rings=rings, **options))
    eval_step = make_eval_step(model, shardings.params, mesh, seq_len=seq_len, accumulate=accumulate)
    state = abstract_state(shardings, transformation, mesh)
    return Program(model, mesh, transformation, shardings, step_on, eval_step, state, NamedSharding(mesh, BATCH))
