"""Attention from a chunk of new tokens to the last cached ones, in layers with a window.

Every device collects the keys of the whole chunk and the last cached ones. Its queries are one or two intervals of the
chunk; each attends to the keys that end with it. So bytes and work grow with the chunk and the window, not with the
cache.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from ringformer.inference.cache.arrays import Cache
from ringformer.ops.ring_attention import ring_attention


class LastSlots(NamedTuple):
    """Slots of the tokens that precede a chunk, by their distance: the last of them is the last token of its row."""

    slots: Int32[Array, "B W"]
    """On this device; arbitrary where it has none."""
    held: Bool[Array, "B W"]
    """True where this device holds the token."""


def last_slots(positions: Int32[Array, "B S"], first: Int32[Array, " B"], tokens: int) -> LastSlots:
    """Find the slots of the `tokens` tokens before position `first` of each row.

    Args:
      positions: position of each slot's token in its row, -1 for an empty slot.
    """
    B, S = positions.shape
    places = positions - first[:, None] + tokens
    places = jnp.where((positions >= 0) & (places >= 0), places, tokens)  # tokens: dropped
    slots = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    slots = jnp.full((B, tokens), -1, jnp.int32).at[jnp.arange(B)[:, None], places].set(slots, mode="drop")
    return LastSlots(jnp.maximum(slots, 0), slots >= 0)


def first_of_chunk(positions: Int32[Array, "B T"], ring: str) -> Int32[Array, " B"]:
    """Return the first position of each row in a chunk; the largest integer for a row that has no token in it."""
    return lax.pmin(jnp.where(positions >= 0, positions, np.iinfo(np.int32).max).min(axis=1), ring)


def attend_window(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    cache: Cache,
    layer: Int32[Array, ""],
    last: LastSlots,
    order: Int[np.ndarray, "ranks T"],
    ring: str,
    **options: Any,
) -> Float[Array, "B T H d"]:
    """Attend from the queries of a chunk to the keys before them in the chunk and in the cache, within the window.

    Args:
      q, k, v: the device's tokens of the chunk. layer: number of the layer in the cache.
      last: slots of as many of the last tokens as the window reaches.
      order: index in the chunk of each token of each device.
      options: those of `ring_attention`, the window among them.
    """
    B, before = last.held.shape
    rows = jnp.arange(B)[:, None]
    natural = np.argsort(order, axis=None)
    held = lax.psum(last.held.astype(jnp.int32), ring)

    def joined(x, cached):
        entries = cached.taken(layer, rows, last.slots).as_dtype(x.dtype)
        share = jnp.where(last.held[:, :, None, None], entries, 0)
        chunk = lax.all_gather(x, ring, axis=1, tiled=True, to="invarying")[:, natural]
        return jnp.concatenate([lax.psum(share, ring), chunk], axis=1)

    k = joined(k, cache.k)
    v = joined(v, cache.v)
    ids = jnp.concatenate([held, jnp.ones((B, order.size), jnp.int32)], axis=1)  # 0: the row has no such token
    starts, length = intervals(order)
    outputs = []
    for i, start in enumerate(jnp.asarray(starts)[lax.axis_index(ring)]):
        mine = q[:, i * length : (i + 1) * length]
        k_part, v_part, k_ids = (lax.dynamic_slice_in_dim(x, start, before + length, 1) for x in (k, v, ids))
        # Queries as many as keys, for the causal mask; those in front belong to no segment.
        padded = jnp.pad(mine, ((0, 0), (before, 0), (0, 0), (0, 0)))
        q_ids = jnp.broadcast_to(jnp.where(jnp.arange(before + length) < before, -1, 1), k_ids.shape)
        o = ring_attention(padded, k_part, v_part, axis_name=None, segment_ids=(q_ids, k_ids), **options)
        outputs.append(o[:, before:])
    return jnp.concatenate(outputs, axis=1)


def intervals(order: Int[np.ndarray, "ranks T"]) -> tuple[Int[np.ndarray, "ranks n"], int]:
    """Cut the tokens of each device into as few equal intervals of the sequence as possible; return their starts and
    their length. Raises ValueError if they are not one or two intervals."""
    ranks, T = order.shape
    for n in (1, 2):
        if T % n == 0:
            parts = order.reshape(ranks, n, T // n)
            if (np.diff(parts, axis=2) == 1).all():
                return parts[:, :, 0], T // n
    raise ValueError("the tokens of a device are not one or two intervals of the chunk")
