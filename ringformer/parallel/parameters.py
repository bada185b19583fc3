"""Parameters of a model, described without arrays: their shapes, and trees of their shardings over the mesh."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from ringformer.models.interface import ModelConfig
from ringformer.models.registry import build
from ringformer.parallel.weight_sharding import shard_weight


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef[Any], dict[str, Any], dict[str, Any]]:
    """Return `(definition, shapes, letters)`: the model without arrays, its logical shapes and their shape letters."""
    definition, state = _abstract_state(config)
    return definition, nnx.to_pure_dict(state), _of_each(_letters, state)


def _abstract_state(config: ModelConfig) -> tuple[nnx.GraphDef[Any], Any]:
    return nnx.split(nnx.eval_shape(lambda: build(config, nnx.Rngs(0))))


def _of_each(function: Callable[[nnx.Variable[Any]], Any], state: Any) -> dict[str, Any]:
    """Return a tree with what a function says of each parameter."""
    return nnx.to_pure_dict(jax.tree.map(function, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))


def _is_of_product(parameter: nnx.Variable[Any]) -> bool:
    """Return True if the layer takes the parameter as a `LayerWeight`; a model of a user's own need not say."""
    return parameter.get_metadata().get("of_product", False)


def _letters(parameter: nnx.Variable[Any]) -> str:
    letters = parameter.get_metadata().get("letters", "")
    if not 1 <= len(letters) <= len(parameter.shape):
        raise ValueError(
            f"a parameter of shape {parameter.shape} has letters={letters!r}: nnx.Param(..., letters=...) "
            "needs a letter for each of its last dimensions"
        )
    return letters


def weight_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Return a tree with a `WeightSharding` for each parameter."""
    _, state = _abstract_state(config)
    shardings = shard_weights(nnx.to_pure_dict(state), _of_each(_letters, state), mesh)
    of_products = _of_each(_is_of_product, state)
    return jax.tree.map(lambda sharding, x: replace(sharding, of_product=x), shardings, of_products)


def shard_weights(shapes: dict[str, Any], letters: dict[str, Any], mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Return a `WeightSharding` for each parameter, from their shapes and shape letters."""
    return jax.tree.map(lambda letter, x: shard_weight(letter, x.shape, mesh), letters, shapes)


def by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a nested dict by name, such as "layers/attention/wq"; those of a flat dict have its keys."""
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def map_by_name(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a tree of `function(name, leaf, ...)` for the leaves of trees of one structure, with names as in
    `by_name`."""
    return jax.tree.map_with_path(lambda path, *leaves: function(_name(path), *leaves), tree, *others)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def specs(shardings: Any) -> Any:
    """Return the PartitionSpecs of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: w.spec, shardings)


def named(shardings: Any, mesh: Mesh) -> Any:
    """Return the NamedShardings of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: w.named(mesh), shardings)


def abstract_params(weights: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return shapes, dtypes and shardings of the parameters."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.padded_shape, w.dtype, sharding=w.named(mesh)), weights)
