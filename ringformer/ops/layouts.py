"""Layouts: the tokens that each rank of the ring holds, and the visiting keys that its queries see.

Definitions for a sequence of n*T tokens on a ring of n ranks:

    contiguous  rank r holds tokens [r*T, (r+1)*T): the paper's layout. Causal work is uneven, (2n-1):1.
    striped     rank r holds tokens r, r+n, r+2n, ... (Brandon et al., Striped Attention).
    zigzag      the sequence is cut into 2n pieces; rank r holds pieces r and 2n-1-r.

A shard has one *part*, or two with zigzag. In every layout, the causal mask between a part of the local queries and a
part of the visiting keys has the form `query_index + offset >= key_index`, with indices counted inside the parts. The
offset depends only on whether the keys come from this rank, an earlier rank or a later rank. So the tables below define
a layout completely, and kernels never see a position.

With head exchange (`head_exchange.py`), each `ulysses` = u neighbours on the mesh axis hold one rank's shard together:
n devices make a ring of n/u ranks, and device i holds piece i mod u of the shard of rank i // u.
"""

import math
from functools import lru_cache
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Int64, Shaped

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


WINDOWED = ("contiguous", "zigzag")
"""Layouts whose parts are intervals of the sequence, so that a window reaches only neighbouring parts."""


def check_name(layout: str) -> None:
    """Raise ValueError for an unknown layout, listing the known ones."""
    if layout not in VISIBLE:
        raise ValueError(f"unknown layout {layout!r}; known layouts: {', '.join(VISIBLE)}")


def check_layout(layout: str, seq_len: int, ring_size: int, ulysses: int = 1) -> None:
    """Raise ValueError unless a sequence of `seq_len` tokens can be laid out on a ring of `ring_size` ranks, each of
    `ulysses` devices."""
    check_name(layout)
    pieces = ring_size * math.lcm(PARTS[layout], ulysses)
    if seq_len <= 0 or seq_len % pieces:
        lower = seq_len // pieces * pieces
        upper = (seq_len // pieces + 1) * pieces
        near = f"{lower} or {upper}" if lower > 0 else f"{upper}"
        each = f", each of {ulysses} devices" if ulysses > 1 else ""
        raise ValueError(
            f"sequence length {seq_len} is not divisible by {pieces}, the pieces that layout {layout!r} makes "
            f"for ring size {ring_size}{each}; try {near}"
        )


def permutation(layout: Layout, seq_len: int, ring_size: int, rings: int = 1) -> Int64[np.ndarray, " {seq_len}"]:
    """Return the token at each index of the concatenated shards of all ranks.

    `x[:, permutation(...)]` moves an array from natural order into the layout. With head exchange, `ring_size` is that
    of the ring, n/u. The ranks may be cut into `rings` smaller rings, each of which has its part of the sequence.
    """
    check_layout(layout, seq_len, ring_size)
    size = ring_size // rings
    length = seq_len // ring_size
    tokens = _tokens(layout, np.arange(size)[:, None], np.arange(length), length, size).reshape(-1)
    return (np.arange(rings)[:, None] * len(tokens) + tokens).reshape(-1)


def positions(
    layout: Layout, length: int, axis_name: str, ulysses: int = 1, rings: int = 1
) -> Int32[Array, " {length}"]:
    """Return the position in the sequence of each of this device's tokens (inside `shard_map`)."""
    ring_size = ring_size_of(axis_name, ulysses, rings)
    check_layout(layout, length * ring_size * ulysses, ring_size, ulysses)
    rank, piece = divmod(lax.axis_index(axis_name), ulysses)
    index = piece * length + np.arange(length, dtype=np.int32)
    return _tokens(layout, rank % ring_size, index, length * ulysses, ring_size)


def part_moves(layout: Layout, ring_size: int, by: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the (source rank, target rank) of every part that moves to the place of the part `by` parts later in the
    sequence, for each (source part, target part). The first part follows the last one. No rank occurs twice as a
    source, or twice as a target, in one list. For layouts in `WINDOWED`."""
    line = places(layout, ring_size)
    moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for piece, (source, part) in enumerate(line):
        target, target_part = line[(piece + by) % len(line)]
        moves.setdefault((part, target_part), []).append((source, target))
    return moves


def places(layout: Layout, ring_size: int) -> list[tuple[int, int]]:
    """Return the (rank, part) of every piece of the sequence, in its order. For layouts in `WINDOWED`."""
    line = [(rank, 0) for rank in range(ring_size)]
    if layout == "zigzag":
        line += [(rank, 1) for rank in reversed(range(ring_size))]
    return line


def intervals(layout: Layout, ring_size: int, ulysses: int = 1) -> list[tuple[int, int]]:
    """Return the (device, interval) of every interval of the sequence, in its order. A device's tokens are one interval
    or two equal ones, as `interval_count` says. For layouts in `WINDOWED`."""
    count = interval_count(layout, ulysses)
    of_part = ulysses * count // PARTS[layout]
    line = []
    for rank, part in places(layout, ring_size):
        for i in range(part * of_part, (part + 1) * of_part):
            line.append((rank * ulysses + i // count, i % count))
    return line


def interval_count(layout: Layout, ulysses: int = 1) -> int:
    """Return the intervals of the sequence that a device holds."""
    return math.lcm(PARTS[layout], ulysses) // ulysses


def parts_before(layout: Layout, ring_size: int, rank: Int32[Array, ""]) -> list[Int32[Array, ""]]:
    """Return how many parts of the sequence precede each part of the rank's shard. For layouts in `WINDOWED`."""
    return [rank, 2 * ring_size - 1 - rank] if layout == "zigzag" else [rank]


def ring_size_of(axis_name: str, ulysses: int, rings: int = 1) -> int:
    """Return the ranks of each of `rings` equal rings on a mesh axis of which each `ulysses` devices are one rank.
    Raises ValueError if there are no such rings."""
    n = lax.axis_size(axis_name)
    if not isinstance(ulysses, int) or ulysses < 1 or n % ulysses:
        raise ValueError(f"ulysses={ulysses!r} does not divide the {n} devices of the mesh axis {axis_name!r}")
    if rings < 1 or n // ulysses % rings:
        raise ValueError(f"rings={rings} does not divide the {n // ulysses} ranks of the mesh axis {axis_name!r}")
    return n // ulysses // rings


def _tokens(layout, rank, index, length, n):
    """Return the token at each index of the shard of `length` tokens of a rank of n."""
    if layout == "striped":
        return index * n + rank
    if layout == "zigzag":
        half = length // 2
        return index + half * (rank * (index < half) + (2 * n - 2 - rank) * (index >= half))
    return rank * length + index


def enter(
    x: Shaped[Array, "B T *rest"], layout: Layout, axis_name: str, ulysses: int = 1
) -> Shaped[Array, "B T *rest"]:
    """Move this device's shard from natural order into `layout` (inside `shard_map`) without gathering the sequence.

    Striped costs one all-to-all (T must divide by the ring size) and, with `ulysses`, one permute; zigzag two permutes
    of half a shard.
    """
    return _move(x, layout, axis_name, ulysses, inverse=False)


def leave(
    x: Shaped[Array, "B T *rest"], layout: Layout, axis_name: str, ulysses: int = 1
) -> Shaped[Array, "B T *rest"]:
    """Move this device's shard from `layout` back into natural order, the inverse of `enter`."""
    return _move(x, layout, axis_name, ulysses, inverse=True)


def _move(x, layout, axis_name, ulysses, inverse):
    r = ring_size_of(axis_name, ulysses)
    B, T, *rest = x.shape
    check_layout(layout, r * ulysses * T, r, ulysses)
    here = np.arange(r * ulysses)

    def permute(x, targets):
        moves = list(zip(here.tolist(), targets.tolist(), strict=True))
        if inverse:
            moves = [(target, source) for source, target in moves]
        return lax.ppermute(x, axis_name, moves)

    if layout == "striped":
        if T % r:
            raise ValueError(f"striped from natural order: local length {T} is not divisible by ring size {r}")
        # Each r neighbours hold consecutive tokens, of which every rank gets an equal share, on one of its devices.
        groups = None if ulysses == 1 else here.reshape(ulysses, r).tolist()
        homes = here.reshape(r, ulysses).T.ravel()
        if inverse and ulysses > 1:
            x = permute(x, homes)
        if inverse:
            x = x.reshape(B, r, T // r, *rest)
        else:
            x = x.reshape(B, T // r, r, *rest).swapaxes(1, 2)
        x = lax.all_to_all(x, axis_name, split_axis=1, concat_axis=1, axis_index_groups=groups, tiled=True)
        if inverse:
            x = x.swapaxes(1, 2)
        x = x.reshape(B, T, *rest)
        if inverse or ulysses == 1:
            return x
        return permute(x, homes)
    if layout == "zigzag":
        if ulysses % 2 == 0:
            return permute(x, _zigzag_homes(r, ulysses))
        sends, receives, targets = _zigzag_rounds(r, ulysses)
        if inverse:
            sends, receives = receives, sends
        device = lax.axis_index(axis_name)
        low = x[:, : T // 2]
        high = x[:, T // 2 :]
        sends_high, receives_high = (jnp.asarray(table)[device] for table in (sends, receives))
        first = permute(jnp.where(sends_high, high, low), targets[0])
        second = permute(jnp.where(sends_high, low, high), targets[1])
        halves = jnp.where(receives_high, second, first), jnp.where(receives_high, first, second)
        return jnp.concatenate(halves, axis=1)
    return x


def _zigzag_homes(r: int, pieces: int) -> Int64[np.ndarray, " {r*pieces}"]:
    """Return the place in zigzag of each piece of the sequence, if a shard has an even number of `pieces`."""
    part, within = np.divmod(np.arange(r * pieces), pieces // 2)
    return np.minimum(part, 2 * r - 1 - part) * pieces + (part >= r) * (pieces // 2) + within


@lru_cache
def _zigzag_rounds(
    r: int, ulysses: int
) -> tuple[Bool[np.ndarray, " n"], Bool[np.ndarray, " n"], Int64[np.ndarray, "2 n"]]:
    """Distribute the halves of all shards over two permutes, so that in each a device sends one half and receives one.

    Returns the devices that send the upper half in the first permute, those that receive the upper half of their shard
    in it, and the target of each device in both.
    """
    homes = _zigzag_homes(r, 2 * ulysses)
    origins = np.argsort(homes)
    permute_of = np.full(len(homes), -1)
    for half in range(len(homes)):
        while permute_of[half] < 0:
            permute_of[half] = 0
            with_it = origins[homes[half] ^ 1]  # arrives on the same device
            permute_of[with_it] = 1
            half = with_it ^ 1  # leaves the same device
    sends = permute_of[1::2] == 0
    receives = permute_of[origins][1::2] == 0
    first = 2 * np.arange(len(sends)) + sends
    return sends, receives, np.stack([homes[first], homes[first ^ 1]]) // 2
