"""The state of a run, how it begins, and where each of its arrays lies."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.models.interface import ModelConfig
from ringformer.models.registry import build
from ringformer.parallel.parameters import abstract_params, named
from ringformer.parallel.weight_sharding import WeightSharding

REPLICATED = WeightSharding((), None, None, (), 1)


class TrainState(NamedTuple):
    """Global arrays, sharded and padded as `weight_sharding` says, or what stands for them: shapes, `WeightSharding`s.

    The step is an int32 scalar; parameters are a nested dict, layers stacked [L, ...].
    """

    step: Any
    params: Any
    opt_state: Any


def decayed(letters: dict) -> dict:
    """Mark the parameters that weight decay applies to, from their shape letters: all but the vectors."""
    return jax.tree.map(lambda letter: len(letter) > 1, letters)


def state_shardings(weights: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """A `WeightSharding` for each array of the state: moments lie where their parameters do."""
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.padded_shape, jnp.float32), weights)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, w: w,
        jax.eval_shape(optimizer.init, shapes),
        weights,
        transform_non_params=lambda _: REPLICATED,
    )
    return TrainState(REPLICATED, weights, opt_state)


def make_init(config: ModelConfig, weights: dict, mesh: Mesh, seed: int):
    """The compiled `init() -> params`, born sharded; a seed gives those of `build(config, Rngs(seed))` everywhere.

    A device draws its own shard alone: JAX's random bits are a function of the key and the place in the array.
    """

    @partial(jax.jit, out_shardings=named(weights, mesh))
    def init():
        params = nnx.to_pure_dict(nnx.state(build(config, nnx.Rngs(seed))))
        return jax.tree.map(
            lambda w, x: jnp.pad(x, [(0, whole - n) for whole, n in zip(w.padded_shape, x.shape, strict=True)]),
            weights,
            params,
        )

    return init


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh, seed: int
) -> TrainState:
    """A fresh state, drawn from the seed."""
    return first_state(make_init(config, shardings.params, mesh, seed)(), optimizer, shardings, mesh)


def first_state(params, optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh) -> TrainState:
    """The state that begins with these parameters: they are taken as they lie, without a copy."""
    step, opt_state = make_first_state(optimizer, shardings, mesh)(params)
    return TrainState(step, params, opt_state)


def make_first_state(optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh):
    """The compiled `first(params) -> (step, opt_state)`."""

    @partial(jax.jit, out_shardings=named((shardings.step, shardings.opt_state), mesh))
    def first(params):
        return jnp.zeros((), jnp.int32), optimizer.init(params)

    return first


def abstract_state(shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, to compile for and to restore into."""
    params = abstract_params(shardings.params, mesh)
    opt_state = jax.tree.map(
        lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, w.spec)),
        jax.eval_shape(optimizer.init, params),
        shardings.opt_state,
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())), params, opt_state)
