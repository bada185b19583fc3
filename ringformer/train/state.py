"""The state of a run, where each of its arrays lies, and its logical form for the disk."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.mesh import WeightSharding, shard_weight
from ringformer.models.llama import Llama, LlamaConfig

REPLICATED = WeightSharding((), None, None, (), 1)


class TrainState(NamedTuple):
    """Global arrays, sharded and padded as `mesh` says; parameters are a nested dict, layers stacked [L, ...]."""

    step: jax.Array
    params: Any
    opt_state: Any


def abstract_model(config: LlamaConfig) -> tuple[nnx.GraphDef, dict, dict]:
    """`(definition, shapes, letters)`: the model without arrays, its logical shapes and their shape letters."""
    definition, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    letters = jax.tree.map(lambda p: p.get_metadata()["letters"], state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return definition, nnx.to_pure_dict(state), nnx.to_pure_dict(letters)


def weight_shardings(config: LlamaConfig, mesh: Mesh) -> dict:
    """A `WeightSharding` for each parameter."""
    _, shapes, letters = abstract_model(config)
    return jax.tree.map(lambda letter, x: shard_weight(letter, x.shape, mesh), letters, shapes)


def decayed(config: LlamaConfig) -> dict:
    """Which parameters weight decay applies to: all but the vectors."""
    return jax.tree.map(lambda letters: len(letters) > 1, abstract_model(config)[2])


def state_shardings(weights: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """A `WeightSharding` for each array of the state: moments lie where their parameters do."""
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.padded_shape, jnp.float32), weights)
    opt_state = optax.tree.map_params(
        optimizer, lambda _, w: w, jax.eval_shape(optimizer.init, shapes), weights,
        transform_non_params=lambda _: REPLICATED,
    )  # fmt: skip
    return TrainState(REPLICATED, weights, opt_state)


def specs(shardings) -> Any:
    """The PartitionSpecs of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: w.spec, shardings)


def named(shardings, mesh: Mesh) -> Any:
    return jax.tree.map(lambda w: NamedSharding(mesh, w.spec), shardings)


def init_state(
    config: LlamaConfig, optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh, seed: int
) -> TrainState:
    """A fresh state, born sharded. Drawn in logical shapes: a seed means the same on every mesh."""

    @partial(jax.jit, out_shardings=named(shardings, mesh))
    def init():
        params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(seed))))
        params = jax.tree.map(_pad, shardings.params, params)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return init()


def abstract_state(shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, to compile for."""
    return _abstract(shardings, optimizer, mesh, lambda w: w.padded_shape, lambda w: w.spec)


def to_logical(tree, shardings, mesh: Mesh):
    """The arrays without padding. Those that were padded are replicated over the axes that did not divide them."""
    target = jax.tree.map(lambda w: NamedSharding(mesh, _logical_spec(w)), shardings)
    return jax.jit(lambda t: jax.tree.map(_cut, shardings, t), out_shardings=target)(tree)


def from_logical(tree, shardings, mesh: Mesh):
    """The inverse of `to_logical`."""
    return jax.jit(lambda t: jax.tree.map(_pad, shardings, t), out_shardings=named(shardings, mesh))(tree)


def abstract_logical(shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the logical state, to restore into."""
    return _abstract(shardings, optimizer, mesh, lambda w: w.shape, _logical_spec)


def abstract_logical_params(weights: dict, mesh: Mesh) -> dict:
    """The parameters' part of `abstract_logical`."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=NamedSharding(mesh, _logical_spec(w))), weights
    )


def _abstract(shardings, optimizer, mesh, shape, spec) -> TrainState:
    def fresh(params):
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(shape(w), jnp.float32), shardings.params)
    return jax.tree.map(
        lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(w))),
        jax.eval_shape(fresh, params), shardings,
    )  # fmt: skip


def _logical_spec(w: WeightSharding) -> P:
    if w.padded_shape == w.shape:
        return w.spec
    return P(*("tp" if i - len(w.shape) == w.tp_dim else None for i in range(len(w.shape))))


def _pad(w: WeightSharding, x):
    return jnp.pad(x, [(0, p - s) for p, s in zip(w.padded_shape, w.shape, strict=True)]) if w.shape else x


def _cut(w: WeightSharding, x):
    return x[tuple(slice(s) for s in w.shape)] if w.shape else x
