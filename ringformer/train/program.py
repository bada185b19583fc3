"""Programs of a run on its mesh: training, evaluations and estimates use the same programs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from ringformer.models.interface import ModelConfig
from ringformer.parallel.lora import NO_ADAPTERS, Adapted, Lora, LoraConfig, combine
from ringformer.parallel.mesh import BATCH
from ringformer.parallel.parameters import abstract_model, abstract_params, weight_shardings
from ringformer.parallel.weight_sharding import WeightSharding
from ringformer.runs.config import OptimizerConfig
from ringformer.train.matrix_layout import is_matrix
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
    lora: Lora | None = None
    """Adapters that the state has instead of weights; None: all weights train."""
    gradients_in_host: Sequence[jax.ShapeDtypeStruct] = ()
    """Shapes, dtypes and shardings of the gradients that a step has in host memory."""

    @property
    def frozen(self) -> list[dict[str, Any]]:
        """Shapes, dtypes and shardings of the frozen weights, an argument of a train step; none without adapters."""
        if self.lora is None:
            return []
        params = abstract_params(self.lora.frozen, self.mesh)
        dtype = jnp.dtype(self.lora.config.base_dtype)
        return [jax.tree.map(lambda x: x.update(dtype=dtype), params)]

    @staticmethod
    def weights(params: dict[str, Any], frozen: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the weights of the model that has these parameters, the argument of an evaluation: with adapters, each
        beside its frozen weight."""
        return combine(frozen[0], params, Adapted) if frozen else params

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
    lora: LoraConfig = NO_ADAPTERS,
) -> Program:
    """Return the program that trains a model on a mesh.

    Args:
      model: model with its kernel (`models/kernel_choice.py`).
      steps: steps of the run, for the learning-rate schedule.
      seq_len: tokens in a sequence, for the evaluation's position buckets.
      accumulate: microbatches in a step and in an evaluation's batch.
      lora: adapters to train instead of the weights.
    """
    _, _, letters = abstract_model(model)
    weights = weight_shardings(model, mesh)
    trained = weights
    adapters = None
    if lora.rank:
        adapters = Lora(lora, model, mesh)
        trained = adapters.adapters
        letters = adapters.letters
        weights = adapters.weights
    transformation = make_optimizer(optimizer, steps, letters, trained)
    moments = trained
    if optimizer.offloads("moments"):
        moments = jax.tree.map(lambda w, of: replace(w, in_host=is_matrix(of)), trained, letters)
    if not adapters:  # which are small: they stay on the devices, in float32
        trained = weights = jax.tree.map(partial(_between_steps, optimizer), weights, letters)
    shardings = state_shardings(trained, transformation, moments)

    options: dict[str, Any] = {"clip_norm": optimizer.clip_norm, "skip_spikes": optimizer.skip_spikes > 0}
    options |= {"accumulate": accumulate, "lora": adapters, "gradients_in_host": optimizer.offloads("all")}
    options |= {"reduce_dtype": optimizer.reduce_dtype}
    step_on = lru_cache(lambda rings: make_train_step(model, transformation, shardings, mesh, rings=rings, **options))
    eval_step = make_eval_step(model, weights, mesh, seq_len=seq_len, accumulate=accumulate)
    state = abstract_state(shardings, transformation, mesh)
    batch = NamedSharding(mesh, BATCH)
    gradients = []
    if optimizer.offloads("all"):
        leaves = zip(jax.tree.leaves(state.params), jax.tree.leaves(trained), strict=True)
        gradients = [x.update(dtype=jnp.float32) for x, w in leaves if w.in_host]
    return Program(model, mesh, transformation, shardings, step_on, eval_step, state, batch, adapters, gradients)


def _between_steps(optimizer: OptimizerConfig, weight: WeightSharding, letters: str) -> WeightSharding:
    """Return the sharding of a trained weight with the memory and the dtype that it has between steps: the optimizer
    chooses those of matrices."""
    if not is_matrix(letters):
        return weight
    return replace(weight, in_host=optimizer.offloads("state"), dtype=optimizer.params_dtype)
