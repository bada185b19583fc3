"""The cache of keys and values, sharded over the ring. An entry stays on the rank that computed it.

Every rank of the ring has the same number of `slots`. A slot holds one token of each row. `positions` records where in
its row that token stands, or -1 for an empty slot. Layouts therefore need no reordering, rows can differ in length, and
a slot can be filled on a single rank.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from ringformer.models.llama_config import LlamaConfig


class Cache(NamedTuple):
    """Keys (rotated) and values of all layers, in the compute dtype, and the position of each token in its row."""

    k: Any  # [L, B, K, S, d]
    v: Any
    positions: Any  # int32 [B, S]


SPECS = Cache(P(None, "dp", "tp", "sp", None), P(None, "dp", "tp", "sp", None), P("dp", "sp"))
"""Heads are sharded over tp, at least one per rank; slots are sharded over the ring."""


def abstract_cache(config: LlamaConfig, mesh: Mesh, rows: int, slots: int) -> Cache:
    """Shapes, dtypes and shardings of the global arrays; `slots` is per rank."""
    heads, S = max(config.num_kv_heads, mesh.shape["tp"]), slots * mesh.shape["sp"]
    kv = (config.num_layers, rows, heads, S, config.head_dim), jnp.dtype(config.compute_dtype)
    arrays = kv, kv, ((rows, S), jnp.dtype(jnp.int32))
    return Cache(
        *(jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, s)) for x, s in zip(arrays, SPECS, strict=True))
    )


def empty_cache(abstract: Cache) -> Cache:
    """A cache without tokens."""

    @partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))
    def make():
        return Cache(*(jnp.full(x.shape, fill, x.dtype) for x, fill in zip(abstract, (0, 0, -1), strict=True)))

    return make()


def layer_of(x: Float[Array, "L B K S d"], layer: Int32[Array, ""], slots: int) -> Float[Array, "B K s d"]:
    """Keys or values of one layer in the device's first `slots` slots."""
    return lax.dynamic_slice(x, (layer, 0, 0, 0, 0), (1, *x.shape[1:3], slots, x.shape[4]))[0]


def write_chunk(
    cache: Cache,
    k: Float[Array, "L B T K d"],
    v: Float[Array, "L B T K d"],
    positions: Int32[Array, "B T"],
    slot: Int32[Array, ""],
) -> Cache:
    """Return the device's cache with T tokens written from `slot` on."""
    k, v = (x.swapaxes(2, 3) for x in (k, v))
    return Cache(
        lax.dynamic_update_slice(cache.k, k, (0, 0, 0, slot, 0)),
        lax.dynamic_update_slice(cache.v, v, (0, 0, 0, slot, 0)),
        lax.dynamic_update_slice(cache.positions, positions, (0, slot)),
    )


def write_token(
    cache: Cache,
    k: Float[Array, "L B K d"],
    v: Float[Array, "L B K d"],
    positions: Int32[Array, " B"],
    slot: Int32[Array, ""],
    mine: Bool[Array, ""],
) -> Cache:
    """Return the device's cache with one token of each row written to `slot`, if `mine`: this rank takes the token."""

    def write(old, new, axis):
        new, start = jnp.expand_dims(new, axis), [0] * old.ndim
        start[axis] = slot
        kept = lax.dynamic_slice(old, start, new.shape)
        return lax.dynamic_update_slice(old, jnp.where(mine, new.astype(old.dtype), kept), start)

    return Cache(write(cache.k, k, 3), write(cache.v, v, 3), write(cache.positions, positions, 1))


class Slots:
    """Count, on the host, how many slots of each rank are taken in any row. The taken slots are the first ones."""

    def __init__(self, ranks: int, capacity: int):
        self.capacity = capacity
        """Slots of a rank."""
        self._taken = np.zeros(ranks, np.int32)

    @property
    def top(self) -> int:
        """Largest number of slots taken on any rank; slots beyond it are empty everywhere."""
        return int(self._taken.max())

    @property
    def free(self) -> int:
        """Number of tokens that can still be generated, over all ranks."""
        return self.capacity * len(self._taken) - int(self._taken.sum())

    @property
    def room(self) -> int:
        """Tokens of the longest chunk that still fits; a chunk takes equally many slots on each rank."""
        return (self.capacity - self.top) * len(self._taken)

    def take_chunk(self, filled: Bool[np.ndarray, "ranks T"]) -> Int32[np.ndarray, " ranks"]:
        """Return each rank's first slot for T tokens. Trailing tokens that are padding in all rows keep no slot: the
        next write overwrites them."""
        if filled.size > self.room:
            raise ValueError(f"{filled.size} tokens do not fit in the cache; it has room for {self.room}")
        starts = self._taken.copy()
        self._taken += filled.sum(axis=1, dtype=np.int32)
        return starts

    def take(self) -> tuple[int, int]:
        """Return (rank, slot) for one more token, on the rank with the fewest taken slots."""
        if not self.free:
            raise ValueError("the cache is full")
        rank = int(self._taken.argmin())
        self._taken[rank] += 1
        return rank, int(self._taken[rank]) - 1
