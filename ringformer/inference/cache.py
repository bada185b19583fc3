"""The cache of keys and values, which lies over the ring as it was computed and is never moved.

A rank of the ring has `slots`, the same number on every one. A slot is a token's place in all rows at once; which token
of a row lies there its position says, and -1 that there is none: layouts may therefore stay as they are, rows be of
unequal length, and a slot be filled on one rank alone.
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
    """Keys and values of all layers, rotated, in the compute dtype, and where in its row each token stands."""

    k: Any  # [L, B, K, S, d]
    v: Any
    positions: Any  # int32 [B, S]


SPECS = Cache(P(None, "dp", "tp", "sp", None), P(None, "dp", "tp", "sp", None), P("dp", "sp"))
"""Heads over tp, each rank of it with at least one, slots over the ring."""


def abstract_cache(config: LlamaConfig, mesh: Mesh, rows: int, slots: int) -> Cache:
    """Shapes, dtypes and shardings of the global arrays, with so many slots on each rank."""
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
    """The first `slots` of a layer of a device's keys or values."""
    return lax.dynamic_slice(x, (layer, 0, 0, 0, 0), (1, *x.shape[1:3], slots, x.shape[4]))[0]


def write_chunk(
    cache: Cache,
    k: Float[Array, "L B T K d"],
    v: Float[Array, "L B T K d"],
    positions: Int32[Array, "B T"],
    slot: Int32[Array, ""],
) -> Cache:
    """The device's cache with T tokens from `slot` on."""
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
    """The device's cache with a token of each row in `slot`, if this rank is the one that takes it."""

    def write(old, new, axis):
        new, start = jnp.expand_dims(new, axis), [0] * old.ndim
        start[axis] = slot
        kept = lax.dynamic_slice(old, start, new.shape)
        return lax.dynamic_update_slice(old, jnp.where(mine, new.astype(old.dtype), kept), start)

    return Cache(write(cache.k, k, 3), write(cache.v, v, 3), write(cache.positions, positions, 1))


class Slots:
    """How many slots of each rank are taken, in any row: the first ones. On the host."""

    def __init__(self, ranks: int, capacity: int):
        self.capacity = capacity
        """Slots of a rank."""
        self._taken = np.zeros(ranks, np.int32)

    @property
    def top(self) -> int:
        """Slots of a rank that may hold something: all beyond are empty, on every rank."""
        return int(self._taken.max())

    @property
    def free(self) -> int:
        """Of all ranks together: tokens that may still be generated."""
        return self.capacity * len(self._taken) - int(self._taken.sum())

    @property
    def room(self) -> int:
        """Tokens of the longest chunk that may still come: each rank has as many slots for it."""
        return (self.capacity - self.top) * len(self._taken)

    def take_chunk(self, filled: Bool[np.ndarray, "ranks T"]) -> Int32[np.ndarray, " ranks"]:
        """The slot of each rank from which on it writes T tokens, of which the last may be padding in all rows: what
        comes next is written over that."""
        if filled.size > self.room:
            raise ValueError(f"{filled.size} tokens do not fit the cache, {self.room} would")
        starts = self._taken.copy()
        self._taken += filled.sum(axis=1, dtype=np.int32)
        return starts

    def take(self) -> tuple[int, int]:
        """(rank, slot) for one more token: of the rank that has the fewest."""
        if not self.free:
            raise ValueError("all slots of the cache are taken")
        rank = int(self._taken.argmin())
        self._taken[rank] += 1
        return rank, int(self._taken[rank]) - 1
