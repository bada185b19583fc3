"""Layouts: the tokens that each rank of the ring holds, and the visiting keys that its queries see.

Definitions for a sequence of n*T tokens on a ring of n ranks:

    contiguous  rank r holds tokens [r*T, (r+1)*T): the paper's layout. Causal work is uneven, (2n-1):1.
    striped     rank r holds tokens r, r+n, r+2n, ... (Brandon et al., Striped Attention).
    zigzag      the sequence is cut into 2n pieces; rank r holds pieces r and 2n-1-r.

A shard has one *part*, or two with zigzag. In every layout, the causal mask between a part of the local queries and a
part of the visiting keys has the form `query_index + offset >= key_index`, with indices counted inside the parts. The
offset depends only on whether the keys come from this rank, an earlier rank or a later rank. So the tables below define
a layout completely, and kernels never see a position.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Int64, Shaped

Layout = Literal["contiguous", "striped", "zigzag"]
Source = Literal["own", "earlier", "later"]

FULL = 2**30
"""An offset at which every key is visible to every query."""

PARTS = {"contiguous": 1, "striped": 1, "zigzag": 2}

VISIBLE: dict[Layout, dict[str, tuple[tuple[int, int, int], ...]]] = {
    "contiguous": {"own": ((0, 0, 0),), "earlier": ((0, 0, FULL),), "later": ()},
    "striped": {"own": ((0, 0, 0),), "earlier": ((0, 0, 0),), "later": ((0, 0, -1),)},
    "zigzag": {
        "own": ((0, 0, 0), (1, 0, FULL), (1, 1, 0)),
        "earlier": ((0, 0, FULL), (1, 0, FULL)),
        "later": ((1, 0, FULL), (1, 1, FULL)),
    },
}
"""Visible (query part, key part, offset) under a causal mask, by layout and by the source of the keys."""


def check_name(layout: str) -> None:
    """Raise ValueError for an unknown layout, listing the known ones."""
    if layout not in VISIBLE:
        raise ValueError(f"unknown layout {layout!r}; known layouts: {', '.join(VISIBLE)}")


def check_layout(layout: str, seq_len: int, ring_size: int) -> None:
    """Raise ValueError unless a sequence of `seq_len` tokens can be laid out on the ring."""
    check_name(layout)
    pieces = ring_size * PARTS[layout]
    if seq_len <= 0 or seq_len % pieces:
        lower, upper = seq_len // pieces * pieces, (seq_len // pieces + 1) * pieces
        near = f"{lower} or {upper}" if lower > 0 else f"{upper}"
        raise ValueError(
            f"sequence length {seq_len} is not divisible by {pieces}, the pieces that layout {layout!r} makes "
            f"for ring size {ring_size}; try {near}"
        )


def permutation(layout: Layout, seq_len: int, ring_size: int) -> Int64[np.ndarray, " {seq_len}"]:
    """Return the token at each index of the concatenated shards of all ranks.

    `x[:, permutation(...)]` moves an array from natural order into the layout.
    """
    check_layout(layout, seq_len, ring_size)
    index = np.arange(seq_len // ring_size)
    return _tokens(layout, np.arange(ring_size)[:, None], index, ring_size).reshape(-1)


def positions(layout: Layout, length: int, axis_name: str) -> Int32[Array, " {length}"]:
    """Return the position in the sequence of each of this device's tokens (inside `shard_map`)."""
    check_layout(layout, length * lax.axis_size(axis_name), lax.axis_size(axis_name))
    return _tokens(layout, lax.axis_index(axis_name), np.arange(length, dtype=np.int32), lax.axis_size(axis_name))


def _tokens(layout, rank, index, n):
    """Return the token at each index of a rank's shard."""
    if layout == "striped":
        return index * n + rank
    if layout == "zigzag":
        half = len(index) // 2
        return index + half * (rank * (index < half) + (2 * n - 2 - rank) * (index >= half))
    return rank * len(index) + index


def enter(x: Shaped[Array, "B T *rest"], layout: Layout, axis_name: str) -> Shaped[Array, "B T *rest"]:
    """Move this device's shard from natural order into `layout` (inside `shard_map`) without gathering the sequence.

    Striped costs one all-to-all (T must divide by the ring size), zigzag two permutes of half a shard.
    """
    return _move(x, layout, axis_name, inverse=False)


def leave(x: Shaped[Array, "B T *rest"], layout: Layout, axis_name: str) -> Shaped[Array, "B T *rest"]:
    """Move this device's shard from `layout` back into natural order, the inverse of `enter`."""
    return _move(x, layout, axis_name, inverse=True)


def _move(x, layout, axis_name, inverse):
    n, (B, T, *rest) = lax.axis_size(axis_name), x.shape
    check_layout(layout, n * T, n)
    if layout == "striped":
        if T % n:
            raise ValueError(f"striped from natural order: local length {T} is not divisible by ring size {n}")
        x = x.reshape(B, n, T // n, *rest) if inverse else x.reshape(B, T // n, n, *rest).swapaxes(1, 2)
        x = lax.all_to_all(x, axis_name, split_axis=1, concat_axis=1, tiled=True)
        return (x.swapaxes(1, 2) if inverse else x).reshape(B, T, *rest)
    if layout == "zigzag":
        # Piece p of 2n lives on rank p//2 in natural order and on rank min(p, 2n-1-p) in zigzag. The even pieces reach
        # every rank once, and so do the odd pieces. So each parity is one permutation of the ranks.
        halves = x[:, : T // 2], x[:, T // 2 :]
        low_is_even = (lax.axis_index(axis_name) % 2 == 0).reshape((1,) * x.ndim)
        home = [[min(p, 2 * n - 1 - p) for p in range(parity, 2 * n, 2)] for parity in (0, 1)]
        if not inverse:
            even, odd = (
                lax.ppermute(half, axis_name, list(enumerate(dest))) for half, dest in zip(halves, home, strict=True)
            )
            # Rank r receives piece r (low) and piece 2n-1-r (high): r's parity says which is which.
            low, high = jnp.where(low_is_even, even, odd), jnp.where(low_is_even, odd, even)
        else:
            even, odd = jnp.where(low_is_even, *halves), jnp.where(low_is_even, *halves[::-1])
            low, high = (
                lax.ppermute(half, axis_name, [(d, s) for s, d in enumerate(dest)])
                for half, dest in zip((even, odd), home, strict=True)
            )
        return jnp.concatenate([low, high], axis=1)
    return x
