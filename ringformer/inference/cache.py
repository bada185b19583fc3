"""The cache of keys and values, sharded over the ring. An entry stays on the rank that computed it.

Every rank of the ring has the same number of `slots`. A slot holds one token of each row. `positions` records that
token's position in its row, or -1 for an empty slot. So layouts need no reordering, rows can differ in length, and a
slot can be filled on only one rank.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


class Cache(NamedTuple):
    """Keys (rotated) and values of all layers, in the compute dtype, and the position of each token in its row."""

    k: Any  # [L, B, K, S, d]; heads are sharded over tp, at least one per rank, and slots over the ring
    v: Any
    positions: Any  # int32 [B, S]


def layer_of(x: Float[Array, "L B K S d"], layer: Int32[Array, ""], slots: int) -> Float[Array, "B K s d"]:
    """Return the keys or values of one layer in the device's first `slots` slots."""
    return lax.dynamic_slice(x, (layer, 0, 0, 0, 0), (1, *x.shape[1:3], slots, x.shape[4]))[0]


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
        start = [0] * old.ndim
        start[axis] = slot
        if mine is not None:
            new = jnp.where(mine, new, lax.dynamic_slice(old, start, new.shape))
        return lax.dynamic_update_slice(old, new, start)

    return Cache(*map(write, cache, (k.swapaxes(2, 3), v.swapaxes(2, 3), positions), (3, 3, 1)))


class Slots:
    """Count, on the host, of the slots of each rank that hold a token of any row. Slots are taken in order."""

    def __init__(self, ranks: int, capacity: int):
        self.capacity = capacity
        """Number of slots of each rank."""
        self._taken = np.zeros(ranks, np.int32)

    @property
    def top(self) -> int:
        """Largest number of slots taken on any rank; all slots beyond it are empty."""
        return int(self._taken.max())

    @property
    def free(self) -> int:
        """Number of tokens that can still be generated, over all ranks."""
        return self.capacity * len(self._taken) - int(self._taken.sum())

    @property
    def room(self) -> int:
        """Number of tokens of the longest chunk that still fits. A chunk takes the same number of slots on each
        rank."""
        return (self.capacity - self.top) * len(self._taken)

    def take_chunk(self, filled: Bool[np.ndarray, "ranks T"]) -> Int32[np.ndarray, " ranks"]:
        """Return each rank's first slot for T tokens. Trailing tokens that are padding in all rows do not keep their
        slots: the next write overwrites them."""
        if filled.size > self.room:
            raise ValueError(f"{filled.size} tokens do not fit in the cache; it has room for {self.room}")
        starts = self._taken.copy()
        self._taken += filled.sum(axis=1, dtype=np.int32)
        return starts

    def release(self, tops: Int32[np.ndarray, " ranks"]) -> None:
        """Free the slots from `tops` on, which hold no token any more."""
        self._taken = np.minimum(self._taken, tops).astype(np.int32)

    def take(self) -> tuple[int, int]:
        """Return (rank, slot) for one more token, on the rank with the fewest taken slots."""
        if not self.free:
            raise ValueError("the cache is full")
        rank = int(self._taken.argmin())
        self._taken[rank] += 1
        return rank, int(self._taken[rank]) - 1
