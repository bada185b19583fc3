"""Parameters of a model without arrays: their shapes, and their sharding over the mesh.

ZeRO-3 shards one dimension over (fsdp, sp). tp shards heads and feed-forward features ("H", "K", "F"); for a weight
without them, tp is one more axis of ZeRO. Vectors are replicated.

ZeRO shards the largest dimension that divides, else the one that needs the least padding. Padding is zero, stays zero
(its gradient is zero), and is removed before a weight is used or written to disk.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.models.interface import ModelConfig
from ringformer.models.registry import build
from ringformer.parallel.gather_weight import gather_weight

TENSOR_PARALLEL = "HKF"
"""Shape letters that tp shards."""


@dataclass(frozen=True)
class WeightSharding:
    """Sharding of one parameter. Dimensions are counted from the end, so that it also fits stacked layers."""

    shape: tuple[int, ...]  # logical; of all stacked layers
    tp_dim: int | None
    zero_dim: int | None
    zero_axes: tuple[str, ...]
    shards: int  # over zero_axes

    @property
    def spec(self) -> P:
        """Axes of each dimension."""
        dims: list = [None] * len(self.shape)
        if self.tp_dim is not None:
            dims[self.tp_dim] = "tp"
        if self.zero_dim is not None:
            dims[self.zero_dim] = self.zero_axes
        return P(*dims)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the global array, with padding."""
        shape = list(self.shape)
        if self.zero_dim is not None:
            shape[self.zero_dim] = -(-shape[self.zero_dim] // self.shards) * self.shards
        return tuple(shape)

    def gather(self, w: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Gather the weight, except over tp, in `dtype` from this device's shard (inside `shard_map`)."""
        if self.zero_dim is None:
            return w
        return gather_weight(w, self.zero_axes, self.zero_dim, self.shape[self.zero_dim], dtype)


def shard_weight(letters: str, shape: tuple[int, ...], mesh: Mesh) -> WeightSharding:
    """Shard a parameter by its shape letters; `shape` may have a leading L that `letters` does not name."""
    sizes = dict(zip(letters, shape[-len(letters) :], strict=True))
    tp = mesh.shape["tp"]
    tp_dim = next(
        (letters.index(x) - len(letters) for x in letters if x in TENSOR_PARALLEL and tp > 1 and sizes[x] % tp == 0),
        None,
    )
    axes = tuple(a for a in ("fsdp", "sp", "tp") if mesh.shape[a] > 1 and not (a == "tp" and tp_dim is not None))
    shards = math.prod(mesh.shape[a] for a in axes)
    if len(letters) == 1 or shards == 1:
        return WeightSharding(shape, tp_dim, None, (), 1)
    candidates = [dim for dim in range(-len(letters), 0) if dim != tp_dim]
    zero_dim = min(candidates, key=lambda dim: (-shape[dim] % shards / shape[dim], -shape[dim]))
    return WeightSharding(shape, tp_dim, zero_dim, axes, shards)


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, dict, dict]:
    """Return `(definition, shapes, letters)`: the model without arrays, its logical shapes and their shape letters."""
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
    """Return a tree with a `WeightSharding` for each parameter."""
    _, shapes, letters = abstract_model(config)
    return shard_weights(shapes, letters, mesh)


def shard_weights(shapes: dict, letters: dict, mesh: Mesh) -> dict:
    """Return a `WeightSharding` for each parameter, from their shapes and shape letters."""
    return jax.tree.map(lambda letter, x: shard_weight(letter, x.shape, mesh), letters, shapes)


def specs(shardings) -> Any:
    """Return the PartitionSpecs of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: w.spec, shardings)


def named(shardings, mesh: Mesh) -> Any:
    """Return the NamedShardings of a tree of `WeightSharding`."""
    return jax.tree.map(lambda w: NamedSharding(mesh, w.spec), shardings)


def abstract_params(weights: dict, mesh: Mesh) -> dict:
    """Return shapes, dtypes and shardings of the parameters."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.padded_shape, jnp.float32, sharding=NamedSharding(mesh, w.spec)), weights
    )
