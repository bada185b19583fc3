"""Sharding of a weight over the mesh.

ZeRO-3 shards one dimension over (fsdp, sp). tp shards heads and feed-forward features ("H", "K", "F"); for a weight
without them, tp is one more axis of ZeRO. Vectors are replicated.

ZeRO shards the largest dimension that divides evenly; if there is none, it shards the dimension that needs the least
padding. Padding is zero, stays zero (its gradient is zero), and is removed before a weight is used or written to disk.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

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
        dims: list[Any] = [None] * len(self.shape)
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
        """Gather the weight in `dtype` from the devices' shards, except over tp (inside `shard_map`)."""
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
