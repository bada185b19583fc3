"""Attention to a cache that is sharded over a ring, for one new token of each row or for a chunk of new tokens.

All tokens in the cache precede the new tokens, so the only mask is whether a slot is valid. A rank without keys for a
row contributes a maximum of -inf and a sum of 0, which leave the merged result unchanged.

In layers with a window, every device collects the keys of the whole chunk and the last cached ones. Its queries are one
or two intervals of the chunk; each attends to the keys that end with it. So bytes and work grow with the chunk and the
window, not with the cache.
"""

from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from ringformer.inference.cache import Cache, layer_of
from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops.ring_attention import ring_attention

Travels = Literal["keys", "queries"]
"""Arrays that travel around the ring when a chunk of queries attends to the cache."""

ATTEND_TOKEN = "attend_token"
"""Name scope of a token's attention, which distinguishes it from the projections in a compiled program."""


class Prefix(NamedTuple):
    """Keys and values of one layer that all rows share."""

    k: Any  # [1, K, P, d]
    v: Any
    valid: Any  # bool [1, P]


def of_prefix(cache: Cache, layer: Int32[Array, ""]) -> Prefix:
    """Return one layer of a cache of one row."""
    slots = cache.positions.shape[1]
    return Prefix(layer_of(cache.k, layer, slots), layer_of(cache.v, layer, slots), cache.positions >= 0)


def cheaper_to_move(config: DecoderConfig, new: int, cached: int) -> Travels:
    """Choose which arrays travel, by the smaller traffic: keys and values of the cached tokens, or queries and outputs
    of the new tokens."""
    return "keys" if new * config.num_heads >= 2 * config.num_kv_heads * (new + cached) else "queries"


@partial(jax.named_call, name=ATTEND_TOKEN)
def attend_token(
    q: Float[Array, "B K G d"],
    k: Float[Array, "B K d"],
    v: Float[Array, "B K d"],
    cached_k: Float[Array, "B K S d"],
    cached_v: Float[Array, "B K S d"],
    valid: Bool[Array, "B S"],
    ring: str,
    scale: float | None = None,
    prefix: Prefix | None = None,
) -> Float32[Array, "B K G d"]:
    """Attend from one token per row to the cached keys of all ranks, to the token's own k and v, and to the keys and
    values of a prefix that all rows share. The token is the same on all ranks.

    Communicates one maximum and one sum, 4 B K G (d + 2) bytes in total, regardless of the length of the context.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def dot(spec, a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    logits = jnp.where(valid[:, None, None], scale * dot("bkgd,bksd->bkgs", q, cached_k), -jnp.inf)
    m = logits.max(axis=-1)
    if prefix is not None:
        before = jnp.where(prefix.valid[:, None, None], scale * dot("bkgd,ksd->bkgs", q, prefix.k[0]), -jnp.inf)
        m = jnp.maximum(m, before.max(axis=-1))

    def share_of(spec, logits, values):
        p = jnp.exp(logits - _shift(m)[..., None])
        return jnp.concatenate([dot(spec, p.astype(v.dtype), values), p.sum(axis=-1)[..., None]], axis=-1)

    share = share_of("bkgs,bksd->bkgd", logits, cached_v)
    if prefix is not None:
        share += share_of("bkgs,ksd->bkgd", before, prefix.v[0])
    own = scale * jnp.einsum("bkgd,bkd->bkg", q.astype(jnp.float32), k.astype(jnp.float32))
    highest = jnp.maximum(lax.pmax(m, ring), own)  # finite: a token sees itself
    total = lax.psum(share * jnp.exp(m - highest)[..., None], ring)
    weight = jnp.exp(own - highest)[..., None]
    return (total[..., :-1] + weight * v[:, :, None].astype(jnp.float32)) / (total[..., -1:] + weight)


def attend_cached(
    q: Float[Array, "B T H d"],
    cached_k: Float[Array, "B K S d"],
    cached_v: Float[Array, "B K S d"],
    valid: Bool[Array, "B S"],
    travels: Travels,
    ring: str,
    **options,
) -> tuple[Float32[Array, "B T H d"], Float32[Array, "B H T"]]:
    """Return (o, lse) of this rank's queries to the valid keys of all ranks; `options` go to `ring_attention`."""
    k, v = (rearrange(x, "b k s d -> b s k d") for x in (cached_k, cached_v))
    axis = ring if travels == "keys" else None
    if axis is None:
        q = lax.all_gather(q, ring, axis=1, tiled=True)
    segments = jnp.zeros(q.shape[:2], jnp.int32), jnp.where(valid, 0, 1)  # empty slots are another segment
    o, lse = ring_attention(q, k, v, axis_name=axis, segment_ids=segments, causal=False, return_lse=True, **options)
    if axis is not None:
        return o.astype(jnp.float32), lse
    highest = lax.pmax(lse, ring)
    weight = jnp.exp(lse - _shift(highest)).swapaxes(1, 2)
    shares = o * weight[..., None], weight
    o, weight = (lax.psum_scatter(x, ring, scatter_dimension=1, tiled=True) for x in shares)
    T = o.shape[1]
    highest = lax.dynamic_slice_in_dim(highest, lax.axis_index(ring) * T, T, axis=2)
    return o / jnp.where(weight == 0, 1.0, weight)[..., None], highest + jnp.log(weight).swapaxes(1, 2)


def attend_prefix(
    q: Float[Array, "B T H d"],
    prefix: Prefix,
    travels: Travels,
    ring: str,
    **options,
) -> tuple[Float32[Array, "B T H d"], Float32[Array, "B H T"]]:
    """Return `attend_cached` to keys that all rows share: the queries of all rows are those of one long row."""
    one_row = rearrange(q, "b t h d -> 1 (b t) h d")
    o, lse = attend_cached(one_row, *prefix, travels, ring, **options)
    B = q.shape[0]
    return rearrange(o, "1 (b t) h d -> b t h d", b=B), rearrange(lse, "1 h (b t) -> b h t", b=B)


def join(*parts: tuple[Float[Array, "B T H d"], Float32[Array, "B H T"]]) -> Float32[Array, "B T H d"]:
    """Merge the attention of the same queries to several sets of keys from (o, lse) of each. Each query must see at
    least one key."""
    highest = reduce(jnp.maximum, (lse for _, lse in parts))
    weights = [jnp.exp(lse - highest).swapaxes(1, 2)[..., None] for _, lse in parts]
    total = reduce(jnp.add, (o * weight for (o, _), weight in zip(parts, weights, strict=True)))
    return total / reduce(jnp.add, weights)


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
    **options,
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
        share = jnp.where(last.held[:, :, None, None], cached[layer, rows, :, last.slots], 0)
        chunk = lax.all_gather(x, ring, axis=1, tiled=True, to="invarying")[:, natural]
        return jnp.concatenate([lax.psum(share, ring), chunk], axis=1)

    k, v = joined(k, cache.k), joined(v, cache.v)
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


def _shift(m: jax.Array) -> jax.Array:
    """Return the maximum to subtract: 0 for a row without keys, where -inf would give NaN."""
    return jnp.where(jnp.isneginf(m), 0.0, m)
