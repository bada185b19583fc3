"""Attention from a chunk of new tokens to a cache that is sharded over a ring.

All tokens in the cache precede the new ones, so the only mask is whether a slot is valid. The cache is read a piece at
a time, and no piece is copied before its turn. Whole pieces hold a token in every slot and need no mask; the other
pieces are masked by segment ids. The results of the pieces are merged by their log-sum-exp.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ringformer.inference.cache.arrays import Cache
from ringformer.inference.cache.slots import Pieces
from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.varying_axes import vary_like

Travels = Literal["keys", "queries"]
"""Arrays that travel around the ring when a chunk of queries attends to the cache."""

Seen = tuple[Float32[Array, "B T H d"], Float32[Array, "B H T"]]
"""Attention of queries to some of their keys, and its log-sum-exp."""


class Reads(NamedTuple):
    """Plan of how a program reads a cache; static."""

    slots: int
    """Slots of a rank that may hold tokens, from the first."""
    piece: int
    """Slots that are read at a time."""
    travels: Travels
    holes: bool = False
    """True if some pieces may be mixed."""

    @property
    def pieces(self) -> int:
        """Number of pieces to read at most."""
        return -(-self.slots // self.piece)


def cheaper_to_move(config: DecoderConfig, new: int, cached: int) -> Travels:
    """Choose which arrays travel, by the smaller traffic: keys and values of the cached tokens, or queries and outputs
    of the new tokens."""
    return "keys" if new * config.num_heads >= 2 * config.num_kv_heads * (new + cached) else "queries"


def attend_cached(
    q: Float[Array, "B T H d"],
    cache: Cache,
    layer: Int32[Array, ""],
    reads: Reads,
    pieces: Pieces,
    ring: str,
    **options,
) -> Seen:
    """Return (o, lse) of this rank's queries to the valid keys of all ranks; `options` go to `ring_attention`."""
    axis = ring if reads.travels == "keys" else None
    if axis is None:
        q = lax.all_gather(q, ring, axis=1, tiled=True)
    B, T, H, _ = q.shape
    slots = cache.positions.shape[1]
    masking = options | {"kernel": "xla"} if options.get("kernel") == "cudnn" else options  # holes are not causal

    def whole(i, seen: Seen) -> Seen:
        start = pieces.order[i] * reads.piece
        return merged(seen, ring_attention(q, *_keys(start), axis_name=axis, causal=False, return_lse=True, **options))

    def mixed(i, seen: Seen) -> Seen:
        first = pieces.order[i] * reads.piece
        start = jnp.minimum(first, slots - reads.piece)  # the last piece overlaps the one before it
        here = start + jnp.arange(reads.piece) >= first
        valid = here & (lax.dynamic_slice_in_dim(cache.positions, start, reads.piece, 1) >= 0)
        segments = jnp.zeros(q.shape[:2], jnp.int32), jnp.where(valid, 0, 1)  # empty slots are another segment
        o, lse = ring_attention(
            q, *_keys(start), axis_name=axis, causal=False, return_lse=True, segment_ids=segments, **masking
        )
        return merged(seen, (o, lse))

    def _keys(start):
        entries = (x.layer(layer, start, reads.piece) for x in (cache.k, cache.v))
        return [rearrange(x.as_dtype(q.dtype), "b k s d -> b s k d") for x in entries]

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full((B, H, T), -jnp.inf, jnp.float32)
    seen = vary_like(nothing, q, cache.k, pieces)
    with jax.named_scope(f"at_most_{reads.pieces}_trips"):
        seen = lax.fori_loop(0, pieces.counts[0], whole, seen)
    if reads.holes:
        with jax.named_scope(f"at_most_{reads.pieces}_trips"):
            seen = lax.fori_loop(pieces.counts[0], pieces.counts.sum(), mixed, seen)
    return seen if axis is not None else _scattered(seen, ring)


def merged(a: Seen, b: Seen) -> Seen:
    """Merge the attention of the same queries to different keys; rows may have seen none."""
    highest = jnp.maximum(a[1], b[1])
    x, y = (jnp.exp(lse - _shift(highest)) for _, lse in (a, b))
    total = x + y
    x, y = ((w / jnp.where(total == 0, 1.0, total)).swapaxes(1, 2)[..., None] for w in (x, y))
    return a[0] * x + b[0].astype(jnp.float32) * y, highest + jnp.log(total)


def _scattered(seen: Seen, ring: str) -> Seen:
    """Merge the attention of all queries to each rank's keys, and return that of this rank's queries."""
    o, lse = seen
    highest = lax.pmax(lse, ring)
    weight = jnp.exp(lse - _shift(highest)).swapaxes(1, 2)
    shares = o * weight[..., None], weight
    o, weight = (lax.psum_scatter(x, ring, scatter_dimension=1, tiled=True) for x in shares)
    T = o.shape[1]
    highest = lax.dynamic_slice_in_dim(highest, lax.axis_index(ring) * T, T, axis=2)
    return o / jnp.where(weight == 0, 1.0, weight)[..., None], highest + jnp.log(weight).swapaxes(1, 2)


def attend_prefix(
    q: Float[Array, "B T H d"],
    cache: Cache,
    layer: Int32[Array, ""],
    reads: Reads,
    pieces: Pieces,
    ring: str,
    **options,
) -> Seen:
    """Return `attend_cached` to the cache of one row that all rows share: the queries of all rows are those of one long
    row."""
    one_row = rearrange(q, "b t h d -> 1 (b t) h d")
    o, lse = attend_cached(one_row, cache, layer, reads, pieces, ring, **options)
    B = q.shape[0]
    return rearrange(o, "1 (b t) h d -> b t h d", b=B), rearrange(lse, "1 h (b t) -> b h t", b=B)


def _shift(m: jax.Array) -> jax.Array:
    """Return the maximum to subtract: 0 for a row without keys, where -inf would give NaN."""
    return jnp.where(jnp.isneginf(m), 0.0, m)
