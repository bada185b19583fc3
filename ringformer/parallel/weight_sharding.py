"""Sharding of a weight over the mesh.

ZeRO-3 shards one dimension over (fsdp, sp). tp shards heads and feed-forward features ("H", "K", "F"); for a weight
without them, tp is one more axis of ZeRO. Vectors are replicated.

ZeRO shards the largest dimension that divides evenly; if there is none, it shards the dimension that needs the least
padding. Large dimensions, such as vocabularies, are padded to whole tiles too (`padded_size`). Padding is zero, stays
zero (its gradient is zero), and is removed before a weight is used or written to disk.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.ops.host_stand_in import device_stand_ins
from ringformer.ops.tokenwise.layer_weight import LayerWeight
from ringformer.parallel.gather_weight import Copy, gather_weight, padded_size, stand_in, with_gradient_for
from ringformer.parallel.host_memory import HOST_MEMORY

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
    of_product: bool = False  # a layer uses it as a `LayerWeight`
    in_host: bool = False  # in pinned memory of the host, not on the device
    dtype: str = "float32"  # of a parameter, between steps

    @property
    def spec(self) -> P:
        """Axes of each dimension."""
        dims: list[Any] = [None] * len(self.shape)
        if self.tp_dim is not None:
            dims[self.tp_dim] = "tp"
        if self.zero_dim is not None:
            dims[self.zero_dim] = self.zero_axes
        return P(*dims)

    def axes(self, dim: int) -> tuple[str, ...]:
        """Return the mesh axes that shard a dimension."""
        if dim == self.tp_dim:
            return ("tp",)
        return self.zero_axes if dim == self.zero_dim else ()

    def named(self, mesh: Mesh) -> NamedSharding:
        """Return the sharding of a global array. It names no memory of absent devices that have none."""
        return NamedSharding(mesh, self.spec, memory_kind=HOST_MEMORY if self.in_host else None)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the global array, with padding."""
        shape = list(self.shape)
        if self.zero_dim is not None:
            shape[self.zero_dim] = padded_size(shape[self.zero_dim], self.shards)
        return tuple(shape)

    def shard_size(self, dim: int, mesh: Mesh | AbstractMesh) -> int:
        """Return the size of a dimension of a device's shard, with padding."""
        return self.padded_shape[dim] // math.prod(mesh.shape[axis] for axis in self.axes(dim))

    def of_state(self, shape: tuple[int, ...]) -> "WeightSharding":
        """Return the sharding of an array that an optimizer keeps for the parameter. Of what it is a mean over, it has
        size 1, and there it is not sharded; its other dimensions are the parameter's.

        Args:
          shape: that of the global array, with padding.
        """
        logical = list(self.shape)
        means = []
        for dim in range(-len(shape), 0):
            if shape[dim] != self.padded_shape[dim]:
                means.append(dim)
                logical[dim] = 1
        sharding = replace(self, shape=tuple(logical))
        if self.tp_dim in means:
            sharding = replace(sharding, tp_dim=None)
        if self.zero_dim in means:
            sharding = replace(sharding, zero_dim=None, zero_axes=(), shards=1)
        return sharding

    def pad(self, w: jax.Array) -> jax.Array:
        """Return the global array with padding, from its logical numbers, in their dtype."""
        padding = [(0, whole - size) for whole, size in zip(self.padded_shape, w.shape, strict=True)]
        return jnp.pad(w, padding)

    def gather(self, w: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Gather the weight in `dtype` from the devices' shards, except over tp (inside `shard_map`)."""
        if self.zero_dim is None:  # float32 vectors stay as they are
            return w if w.dtype == jnp.float32 else w.astype(dtype)
        return gather_weight(w, self.zero_axes, self.zero_dim, self.shape[self.zero_dim], dtype)

    def for_layer(self, w: jax.Array | Copy, dtype: DTypeLike) -> jax.Array | LayerWeight:
        """Gather the weight as a layer uses it: its gradient is float32 if it is that of products."""
        if not (self.of_product or isinstance(w, Copy)):
            return self.gather(w, dtype)
        of_shard, gets_gradient = (w.w, w.stand_in) if isinstance(w, Copy) else (w, w)
        gathered = lax.stop_gradient(self.gather(of_shard, dtype)).astype(dtype)
        gradient = device_stand_ins(gets_gradient, of_shard)
        if self.zero_dim is not None:
            gradient = stand_in(gradient, self.zero_axes, self.zero_dim, self.shape[self.zero_dim])
        if self.of_product:
            return LayerWeight(gathered, gradient)
        return with_gradient_for(gathered, gradient)


def shard_weight(letters: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> WeightSharding:
    """Shard a parameter by its shape letters; `shape` may have a leading L that `letters` does not name."""
    sizes = dict(zip(letters, shape[-len(letters) :], strict=True))
    tp = mesh.shape["tp"]
    tp_dim = None
    zero = ["fsdp", "sp", "tp"]
    for letter in letters:
        if tp > 1 and letter in TENSOR_PARALLEL and sizes[letter] % tp == 0:
            tp_dim = letters.index(letter) - len(letters)
            zero.remove("tp")
            break
    axes = tuple(axis for axis in zero if mesh.shape[axis] > 1)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if len(letters) == 1 or shards == 1:
        return WeightSharding(shape, tp_dim, None, (), 1)
    candidates = [dim for dim in range(-len(letters), 0) if dim != tp_dim]
    zero_dim = min(candidates, key=lambda dim: (-shape[dim] % shards / shape[dim], -shape[dim]))
    return WeightSharding(shape, tp_dim, zero_dim, axes, shards)
