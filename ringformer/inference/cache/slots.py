"""Account, on the host, of the slots of a session's cache: which of them hold which tokens."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32


class Pieces(NamedTuple):
    """Pieces of a cache, equal numbers of slots, that hold tokens; arrays of the host or of the devices."""

    order: Any  # int32 [N]
    """Numbers of the pieces: the whole ones first, then the mixed ones, then the empty ones."""
    counts: Any  # int32 [2]
    """Number of whole pieces, where every slot holds a token of every row on every rank; number of mixed pieces, where
    only some do."""


class Slots:
    """The slots of each rank and row that hold a token. They are taken in order.

    Args:
      capacity: number of slots of each rank.
    """

    def __init__(self, rows: int, ranks: int, capacity: int):
        self.capacity = capacity
        self._taken = np.zeros(ranks, np.int32)
        self._positions = np.full((rows, ranks, capacity), -1, np.int32)

    @classmethod
    def holding(cls, positions: Int32[np.ndarray, "B ranks N"], capacity: int) -> "Slots":
        """Return slots of which the first N of each rank hold the tokens at `positions`, -1 for none."""
        rows, ranks, used = positions.shape
        slots = cls(rows, ranks, capacity)
        slots._positions[:, :, :used] = positions
        slots._taken = _ends(positions)
        return slots

    @property
    def ranks(self) -> int:
        """Number of ranks of the ring."""
        return len(self._taken)

    @property
    def positions(self) -> Int32[np.ndarray, "B slots"]:
        """Copy of the position of the token in each slot, rank by rank; -1 for an empty slot."""
        return self._positions.reshape(len(self._positions), -1).copy()

    @property
    def lengths(self) -> Int32[np.ndarray, " B"]:
        """Number of tokens of each row."""
        return self._positions.max(axis=(1, 2)) + 1

    @property
    def top(self) -> int:
        """Largest number of slots taken on any rank; all slots beyond it are empty."""
        return int(self._taken.max())

    @property
    def free(self) -> int:
        """Number of tokens that can still be generated, over all ranks."""
        return self.capacity * self.ranks - int(self._taken.sum())

    @property
    def room(self) -> int:
        """Number of tokens of the longest chunk that still fits. A chunk takes the same number of slots on each
        rank."""
        return (self.capacity - self.top) * self.ranks

    def take_chunk(self, positions: Int32[np.ndarray, "B ranks T"]) -> Int32[np.ndarray, " ranks"]:
        """Return each rank's first slot for T tokens of each row; position -1 is padding. Trailing tokens that are
        padding in all rows do not keep their slots: the next write overwrites them."""
        _, ranks, T = positions.shape
        if ranks * T > self.room:
            raise ValueError(f"{ranks * T} tokens do not fit in the cache; it has room for {self.room}")
        starts = self._taken.copy()
        for rank, start in enumerate(starts):
            self._positions[:, rank, start : start + T] = positions[:, rank]
        self._taken += _ends(positions)
        return starts

    def take(self, positions: Int32[np.ndarray, " B"]) -> tuple[int, int]:
        """Return (rank, slot) for one more token of each row, on the rank with the fewest taken slots; position -1: the
        row has none."""
        if not self.free:
            raise ValueError("the cache is full")
        rank = int(self._taken.argmin())
        slot = int(self._taken[rank])
        self._positions[:, rank, slot] = positions
        self._taken[rank] += 1
        return rank, slot

    def truncate(self, lengths: Int32[np.ndarray, " B"]) -> None:
        """Free the slots of the tokens of each row beyond a length."""
        self._positions[self._positions >= np.asarray(lengths)[:, None, None]] = -1
        self._taken = np.minimum(self._taken, _ends(self._positions))

    def pieces(self, size: int) -> Pieces:
        """Divide the slots of a rank into pieces of `size` slots. A last piece that has fewer is never whole."""
        held = self._positions >= 0
        all_ = held.all(axis=(0, 1))
        any_ = held.any(axis=(0, 1))
        missing = -self.capacity % size
        whole = np.pad(all_, (0, missing)).reshape(-1, size).all(axis=1)
        mixed = np.pad(any_, (0, missing)).reshape(-1, size).any(axis=1) & ~whole
        order = np.argsort(np.where(whole, 0, np.where(mixed, 1, 2)), kind="stable")
        return Pieces(order.astype(np.int32), np.array([whole.sum(), mixed.sum()], np.int32))


def _ends(positions: Int32[np.ndarray, "B ranks T"]) -> Int32[np.ndarray, " ranks"]:
    """Return the number of slots up to the last that holds a token."""
    numbers = np.arange(1, positions.shape[2] + 1, dtype=np.int32)
    return np.where(positions >= 0, numbers, 0).max(axis=(0, 2), initial=0)
