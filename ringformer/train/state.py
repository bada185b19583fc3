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
from ringformer.weight_sharding import WeightSharding, shard_weight

REPLICATED = WeightSharding((), None, None, (), 1)


class TrainState(NamedTuple):
    """Global arrays, sharded and padded as `weight_sharding` says, or what stands for them: shapes, `WeightSharding`s.

    The step is an int32 scalar; parameters are a nested dict, layers stacked [L, ...].
    """

    step: Any
    params: Any
    opt_state: Any


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, dict, dict]:
    """`(definition, shapes, letters)`: the model without arrays, its logical shapes and their shape letters."""
    definition, state = nnx.split(nnx.eval_shape(lambda: build(config, nnx.Rngs(0))))
    letters = jax.tree.map(_letters, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return definition, nnx.to_pure_dict(state), nnx.to_pure_dict(letters)


def _letters(parameter: nnx.Variable) -> str:
    letters = parameter.get_metadata().get("letters", "")
    if not 1 <= len(letters) <= len(parameter.shape):
        raise ValueError(
            f"a parameter of shape {parameter.shape} has letters={letters!r}: nnx.Param(..., letters=...) "
            "needs a letter for each of its last dimensions"
        )
    return letters


def weight_shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """A `WeightSharding` for each parameter."""
    _, shapes, letters = abstract_model(config)
    return jax.tree.map(lambda letter, x: shard_weight(letter, x.shape, mesh), letters, shapes)


def decayed(config: ModelConfig) -> dict:
    """Which parameters weight decay applies to: all but the vectors."""
    return jax.tree.map(lambda letters: len(letters) > 1, abstract_model(config)[2])


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


def specs(shardings) -> Any:
    """The PartitionSpecs of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: w.spec, shardings)


def named(shardings, mesh: Mesh) -> Any:
    """The NamedShardings of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: NamedSharding(mesh, w.spec), shardings)


def make_init(config: ModelConfig, weights: dict, mesh: Mesh, seed: int):
    """The compiled `init() -> params`, born sharded; a seed gives those of `build(config, Rngs(seed))` everywhere.

    A device draws its own shard alone: JAX's random bits are a function of the key and the place in the array.
    """

    @partial(jax.jit, out_shardings=named(weights, mesh))
    def init():
        return jax.tree.map(_pad, weights, nnx.to_pure_dict(nnx.state(build(config, nnx.Rngs(seed)))))

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


def abstract_params(weights: dict, mesh: Mesh) -> dict:
    """Shapes, dtypes and shardings of the parameters."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.padded_shape, jnp.float32, sharding=NamedSharding(mesh, w.spec)), weights
    )


def abstract_state(shardings: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, to compile for and to restore into."""
    params = abstract_params(shardings.params, mesh)
    opt_state = jax.tree.map(
        lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, w.spec)),
        jax.eval_shape(optimizer.init, params),
        shardings.opt_state,
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())), params, opt_state)


def _pad(w: WeightSharding, x):
    return jnp.pad(x, [(0, p - s) for p, s in zip(w.padded_shape, w.shape, strict=True)])
