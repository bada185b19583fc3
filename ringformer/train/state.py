"""State of a run: its initial values, and the sharding of each of its arrays."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.models.interface import ModelConfig
from ringformer.models.registry import build
from ringformer.parallel.host_memory import HOST_MEMORY, device_bytes, finite_in_host
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


def state_shardings(
    weights: dict[str, Any], optimizer: optax.GradientTransformation, moments: dict[str, Any] | None = None
) -> TrainState:
    """Return a `WeightSharding` for each array of the state.

    Args:
      weights: those of the parameters.
      moments: those of the arrays that the optimizer keeps for a parameter; None: as the parameters.
    """
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.padded_shape, jnp.float32), weights)
    kept = weights if moments is None else moments

    def of_part(node):
        if not is_of_params(node):
            return REPLICATED
        return jax.tree.map(lambda x, w: w.of_state(x.shape), node, kept)

    opt_state = jax.tree.map(of_part, jax.eval_shape(optimizer.init, shapes), is_leaf=is_of_params)
    return TrainState(REPLICATED, weights, opt_state)


def is_of_params(node: Any) -> bool:
    """Return True for a part of an optimizer's state that has an array for each parameter: they are dicts, as
    parameters are; everything else is a tuple or a number."""
    return isinstance(node, dict)


def make_init(config: ModelConfig, weights: dict[str, Any], mesh: Mesh, seed: int) -> jax.stages.Wrapped:
    """Return the jitted `init() -> params`. The parameters are sharded from the start. On every mesh, they equal those
    of `build(config, Rngs(seed))`, rounded to the dtypes of `weights`.

    A device draws only its own shard: JAX's random bits are a function of the key and the index in the array.
    """

    @partial(jax.jit, out_shardings=named(weights, mesh))
    def init():
        params = nnx.to_pure_dict(nnx.state(build(config, nnx.Rngs(seed))))
        return jax.tree.map(lambda w, x: w.pad(x.astype(w.dtype)), weights, params)

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
    step, on_device = make_first_state(optimizer, shardings, mesh)(params)
    fill = partial(jax.tree.map, lambda x, w, in_device: _zeros(x) if w.in_host else in_device)
    opt_state = fill(abstract_state(shardings, optimizer, mesh).opt_state, shardings.opt_state, on_device)
    return TrainState(step, params, opt_state)


def make_first_state(optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh) -> jax.stages.Wrapped:
    """Return the jitted `first(params) -> (step, opt_state)`, where arrays of the optimizer's state that are in host
    memory are only scalars: their zeros are made there (`init_state`), since the device may have no room for them."""
    in_device = jax.tree.map(lambda w: REPLICATED if w.in_host else w, shardings.opt_state)

    @partial(jax.jit, out_shardings=named((shardings.step, in_device), mesh))
    def first(params):
        opt_state = optimizer.init(params)
        kept = jax.tree.map(lambda x, w: jnp.zeros((), x.dtype) if w.in_host else x, opt_state, shardings.opt_state)
        return jnp.zeros((), jnp.int32), kept

    return first


def _zeros(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of zeros that no program makes: each process writes its own shards."""
    sharding = abstract.sharding
    assert sharding is not None
    shard = np.zeros(sharding.shard_shape(abstract.shape), abstract.dtype)
    return jax.make_array_from_callback(abstract.shape, sharding, lambda index: shard)


def abstract_state(shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Return the shapes, dtypes and shardings of a state, for compiling and restoring."""
    params = abstract_params(shardings.params, mesh)
    opt_state = jax.tree.map(
        lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w.named(mesh)),
        jax.eval_shape(optimizer.init, params),
        shardings.opt_state,
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())), params, opt_state)


def has_host_memory(shardings: TrainState) -> bool:
    """Return True if a part of the state is in host memory."""
    return any(w.in_host for w in jax.tree.leaves(shardings))


def state_in_host_bytes(state: TrainState, shardings: TrainState) -> int:
    """Bytes of a device's shards of the arrays that are in host memory."""
    return device_bytes(jax.tree.map(lambda x, w: x if w.in_host else None, state, shardings))


def marked_host_memory(tree: Any, shardings: Any) -> Any:
    """Return traced arrays of which those in host memory are of that type. They already are, except in programs for
    absent devices that have no memories."""

    def mark(sharding, x):
        in_host = isinstance(sharding, WeightSharding) and sharding.in_host  # not a frozen weight with its adapter
        return jax.device_put(x, jax.memory.Space.Host) if in_host else x

    return jax.tree.map(mark, shardings, tree)


def check_state_finite(state: Any, which: str) -> None:
    """Raise FloatingPointError if any number of the state is not finite. In the message, `which` follows the words "the
    state"."""
    if not is_finite(state):
        raise FloatingPointError(f"the state {which} has numbers that are not finite; it is not saved")


def is_finite(tree: Any) -> bool:
    """Return True if all numbers of global arrays are finite, whether these are on the device or in host memory."""
    on_device = []
    finite = []
    for x in jax.tree.leaves(tree):
        if x.sharding.memory_kind == HOST_MEMORY:
            finite.append(finite_in_host(x.sharding)(x))
        else:
            on_device.append(x)
    if on_device:
        finite.append(all_finite(on_device))
    return all(map(bool, finite))


@jax.jit
def all_finite(tree) -> jax.Array:
    """Return a bool scalar that is True if all numbers of a tree are finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
