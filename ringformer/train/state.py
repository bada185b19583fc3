"""State of a run: its initial values, and the sharding of each of its arrays."""

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
    """Global arrays, sharded and padded as in `weight_sharding`; or the arrays' shapes, or their `WeightSharding`s.

    The step is an int32 scalar; parameters are a nested dict whose layers are stacked, [L, ...].
    """

    step: Any
    params: Any
    opt_state: Any


def state_shardings(weights: dict[str, Any], optimizer: optax.GradientTransformation) -> TrainState:
    """Return a `WeightSharding` for each array of the state; moments are sharded like their parameters."""
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.padded_shape, jnp.float32), weights)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, w: w,
        jax.eval_shape(optimizer.init, shapes),
        weights,
        transform_non_params=lambda _: REPLICATED,
    )
    return TrainState(REPLICATED, weights, opt_state)


def make_init(config: ModelConfig, weights: dict[str, Any], mesh: Mesh, seed: int) -> jax.stages.Wrapped:
    """Return the jitted `init() -> params`. The parameters are sharded from the start. On every mesh, they equal those
    of `build(config, Rngs(seed))`.

    A device draws only its own shard: JAX's random bits are a function of the key and the index in the array.
    """

    @partial(jax.jit, out_shardings=named(weights, mesh))
    def init():
        params = nnx.to_pure_dict(nnx.state(build(config, nnx.Rngs(seed))))
        return jax.tree.map(WeightSharding.pad, weights, params)

    return init


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    mesh: Mesh,
    seed: int,
    params: dict[str, Any] | None = None,
) -> TrainState:
    """Return the state of step 0 with `params`, which are not copied; without `params`, draw them from the seed."""
    if params is None:
        params = make_init(config, shardings.params, mesh, seed)()
    step, opt_state = make_first_state(optimizer, shardings, mesh)(params)
    return TrainState(step, params, opt_state)


def make_first_state(optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh) -> jax.stages.Wrapped:
    """Return the jitted `first(params) -> (step, opt_state)`."""

    @partial(jax.jit, out_shardings=named((shardings.step, shardings.opt_state), mesh))
    def first(params):
        return jnp.zeros((), jnp.int32), optimizer.init(params)

    return first


def abstract_state(shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Return the shapes, dtypes and shardings of a state, for compiling and restoring."""
    params = abstract_params(shardings.params, mesh)
    opt_state = jax.tree.map(
        lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, w.spec)),
        jax.eval_shape(optimizer.init, params),
        shardings.opt_state,
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())), params, opt_state)


def check_state_finite(state: Any, which: str) -> None:
    """Raise FloatingPointError if any number of the state is not finite. In the message, `which` follows the words "the
    state"."""
    if not bool(all_finite(state)):
        raise FloatingPointError(f"the state {which} has numbers that are not finite; it is not saved")


@jax.jit
def all_finite(tree) -> jax.Array:
    """Return a bool scalar that is True if all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
