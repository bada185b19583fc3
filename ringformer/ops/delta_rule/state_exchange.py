"""Exchange of states: each piece of a sequence gets the state that the pieces before it left, on whichever ranks.

Piece p maps the state before it, S_p, to the state behind it: M_p S_p + U_p. A rank has a piece for each part of its
shard (`layouts.py`), so a zigzag rank has two, far apart; no token moves:

    rank               0      1      2      2      1      0
    piece              0      1      2      3      4      5          M, U: one map a piece
    state before it    0     U_0    M_1 U_0 + U_1   ...              each by all pieces before it

    gathered    all ranks get the maps of all pieces, and apply those before their own: one hop of latency, 2n maps.
    scanned     maps of 1, 2, 4, ... neighbouring pieces are composed, log2(n) hops forward along the first parts and
                as many back along the second parts: 2 log2(n) maps and states.

Backward, the gradient of the state behind piece p is that of the state before piece p + 1, which is M^T times the one
behind it, plus what the outputs of the piece add: the same exchange, in the opposite order.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int

from ringformer.ops import layouts
from ringformer.ops.delta_rule.chunks import Maps
from ringformer.ops.ring import Ring
from ringformer.ops.varying_axes import vary_like

MOST_GATHERED = 8
"""Largest ring whose maps are gathered: of 8 ranks, 14 maps arrive at once, instead of half as many one by one."""

States = Float32[Array, "P B K r dk dv"]
"""A state for each part of the shard."""

_times = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def states_before(ring: Ring, rank: Int[Array, ""], maps: Maps, *, backward: bool = False) -> States:
    """Return what all pieces before each piece of this rank make of a state of zeros.

    Args:
      rank: place of this rank on the ring.
      maps: those of this rank's pieces, with a leading axis of parts.
      backward: the line of pieces begins with the last one.
    """
    if ring.size <= MOST_GATHERED:
        return _gathered(ring, rank, maps, backward)
    return _scanned(ring, rank, maps, backward)


def _after(maps: Maps, state):
    """Return the state behind a piece, given the one before it."""
    return _times(maps.m, state) + maps.u


def _composed(maps: Maps, earlier: Maps) -> Maps:
    """Return the map of two neighbouring pieces."""
    return Maps(_times(maps.m, earlier.m), _after(maps, earlier.u))


def _gathered(ring: Ring, rank, maps: Maps, backward: bool) -> States:
    """Apply the maps of all pieces in their order, and keep the states before this rank's pieces."""
    ranks, parts = np.transpose(layouts.places(ring.layout, ring.size))
    line = jax.tree.map(lambda x: ring.gather(x)[ranks, parts], maps)
    own = jnp.stack(layouts.parts_before(ring.layout, ring.size, rank))
    nothing = vary_like(jnp.zeros_like(maps.u), maps, rank)

    def turn(carry, piece):
        state, kept = carry
        place, maps = piece
        is_own = (own == place).reshape(-1, *[1] * state.ndim)
        return (_after(maps, state), jnp.where(is_own, state, kept)), None

    pieces = jnp.arange(len(ranks)), line
    return lax.scan(turn, (nothing[0], nothing), pieces, reverse=backward)[0][1]


def _scanned(ring: Ring, rank, maps: Maps, backward: bool) -> States:
    """Compose the maps of the first parts along the ring, then those of the second parts back along it."""
    parts = [jax.tree.map(lambda x, part=part: x[part], maps) for part in range(ring.parts)]
    if backward:
        parts.reverse()
    direction: Literal[1, -1] = 1 if len(parts) == 2 or not backward else -1
    before, behind = _along(ring, rank, parts[0], direction, None)
    states = [before]
    if len(parts) == 2:
        before, _ = _along(ring, rank, parts[1], -1, behind)
        states.append(before)
    if backward:
        states.reverse()
    return jnp.stack(states)


def _along(ring: Ring, rank, maps: Maps, direction: Literal[1, -1], start):
    """Return the state before a piece of this rank, and the one behind it, on a line of one piece a rank.

    Args:
      direction: 1 if rank 0 is the first of the line, -1 if it is the last.
      start: the state before the line, on the first rank; None: zeros.
    """
    place = rank if direction == 1 else ring.size - 1 - rank
    if start is not None:
        maps = Maps(maps.m, jnp.where(place == 0, _after(maps, start), maps.u))
    distance = 1
    while distance < ring.size:
        is_last = 2 * distance >= ring.size
        if is_last:
            composed = Maps(maps.m, _after(maps, ring.send(maps.u, distance * direction)))
        else:
            composed = _composed(maps, ring.send(maps, distance * direction))
        maps = jax.tree.map(lambda new, old, d=distance: jnp.where(place >= d, new, old), composed, maps)
        distance *= 2
    before = ring.send(maps.u, direction)
    if start is not None:
        before = jnp.where(place == 0, start, before)
    return before, maps.u
