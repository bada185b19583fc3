"""The cache of keys and values, sharded over the ring. An entry stays on the rank that computed it.

Every rank of the ring has the same number of slots. A slot holds one token of each row. `positions` records that
token's position in its row, or -1 for an empty slot. So layouts need no reordering, rows can differ in length, and a
slot can be filled on only one rank.

Entries are in the compute dtype or in int8. An int8 entry has one scale per token and head, max |x| / 127.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

CacheDtype = Literal["compute", "int8"]
"""Dtype of the cached keys and values: the compute dtype, or int8 with a scale per token and head."""

LARGEST = 127
"""Largest int8 value in use; the values are symmetric around 0."""


FIRST = np.int32(0)
"""Index of an array's first element. All indices of a slice must have one dtype, and under `jax_enable_x64` a Python 0
beside an int32 is int64."""


class Entries(NamedTuple):
    """Keys or values: of all layers [L, B, K, S, d], or of one layer [B, K, S, d]."""

    values: Any
    scales: Any = None
    """float32 [..., S] of int8 values; None for others."""

    def layer(self, layer: int | Int32[Array, ""], start: int | jax.Array, slots: int) -> "Entries":
        """Return so many slots of one layer from `start`, in memory in the cache's order of axes: XLA would otherwise
        copy the whole cache into the order that suits the reader."""

        def cut(x):
            number = np.int32(layer) if isinstance(layer, int) else layer
            slot = np.int32(start) if isinstance(start, int) else start
            begin = (number, FIRST, FIRST, slot, FIRST)[: x.ndim]
            size = (1, *x.shape[1:3], slots, *x.shape[4:])
            return with_layout_constraint(lax.dynamic_slice(x, begin, size)[0], Layout(tuple(range(x.ndim - 1))))

        return jax.tree.map(cut, self)

    def taken(self, layer: Int32[Array, ""], rows: Int32[Array, "B 1"], slots: Int32[Array, "B W"]) -> "Entries":
        """Return the entries of one layer in the given slots of each row, [B, W, K, d]."""
        return jax.tree.map(lambda x: x[layer, rows, :, slots], self)

    def as_dtype(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the entries in a floating dtype."""
        if self.scales is None:
            return self.values.astype(dtype)
        return (self.values.astype(jnp.float32) * self.scales[..., None]).astype(dtype)


class Cache(NamedTuple):
    """Keys (rotated) and values of all layers, and the position of each token in its row."""

    k: Any  # Entries [L, B, K, S, d]; heads are sharded over tp, at least one per rank, and slots over the ring
    v: Any
    positions: Any  # int32 [B, S]


class LayerCache(NamedTuple):
    """Entries of one layer, of each row or of one row that all rows share."""

    k: Entries  # [B or 1, K, S, d]
    v: Entries
    valid: Bool[Array, "B S"]


def layer_cache(cache: Cache, layer: int | Int32[Array, ""], slots: int) -> LayerCache:
    """Return one layer of the device's first `slots` slots."""
    k, v = (x.layer(layer, 0, slots) for x in (cache.k, cache.v))
    return LayerCache(k, v, cache.positions[:, :slots] >= 0)


def as_entries(x: Float[Array, "... d"], like: Entries) -> Entries:
    """Convert new keys or values to the form of cached ones."""
    if like.scales is None:
        return Entries(x.astype(like.values.dtype))
    x = x.astype(jnp.float32)
    scales: Float32[Array, ...] = jnp.abs(x).max(axis=-1) / LARGEST
    return Entries(jnp.round(x / jnp.where(scales == 0, 1.0, scales)[..., None]).astype(jnp.int8), scales)


def write_tokens(
    cache: Cache,
    k: Float[Array, "L B T K d"],
    v: Float[Array, "L B T K d"],
    positions: Int32[Array, "B T"],
    slot: Int32[Array, ""],
    mine: Bool[Array, ""] | None = None,
) -> Cache:
    """Return the device's cache with T tokens of each row written from `slot` on, or unchanged if `mine` is False."""

    def write(old, new, axis):
        start: list[np.int32 | jax.Array] = [FIRST] * old.ndim
        start[axis] = slot
        if mine is not None:
            new = jnp.where(mine, new, lax.dynamic_slice(old, start, new.shape))
        return lax.dynamic_update_slice(old, new, start)

    def entries(old: Entries, new) -> Entries:
        return jax.tree.map(lambda a, b: write(a, b, 3), old, as_entries(new.swapaxes(2, 3), old))

    return Cache(entries(cache.k, k), entries(cache.v, v), write(cache.positions, positions, 1))
