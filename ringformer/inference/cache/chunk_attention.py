"""Attention from a chunk of new tokens to a cache that is sharded over a ring.

All tokens in the cache precede the new ones, so the only mask is whether a slot is valid. The cache is read a piece at
a time, and no piece is copied before its turn. Whole pieces hold a token in every slot and need no mask; the other
pieces are masked by segment ids. The results of the pieces are states of a running softmax (`ops/online_softmax.py`).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ringformer.inference.cache.arrays import Cache
from ringformer.inference.cache.slots import Pieces
from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops import online_softmax
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.varying_axes import vary_like

Travels = Literal["keys", "queries"]
"""Arrays that travel around the ring when a chunk of queries attends to the cache."""


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
    **options: Any,
) -> Softmax:
    """Attend from this rank's queries to the valid keys of all ranks. The cache may have one row that all rows of
    queries share. Return the state of rows [B, T, H]; `options` go to `ring_attention`."""
    B = len(q)
    slots = cache.positions.shape[1]
    q = rearrange(q, "(rows b) t h d -> rows (b t) h d", rows=len(cache.positions))  # a shared cache has one long row
    axis = ring if reads.travels == "keys" else None
    if axis is None:
        q = lax.all_gather(q, ring, axis=1, tiled=True)
    rows, T, H, d = q.shape

    def attend(state: Softmax, start: jax.Array, **more) -> Softmax:
        entries = (x.layer(layer, start, reads.piece).as_dtype(q.dtype) for x in (cache.k, cache.v))
        k, v = (rearrange(x, "b k s d -> b s k d") for x in entries)
        seen = ring_attention(q, k, v, axis_name=axis, causal=False, return_lse=True, **options | more)
        return online_softmax.join(state, softmax_of(*seen))

    def whole(i, state: Softmax) -> Softmax:
        return attend(state, pieces.order[i] * reads.piece)

    def mixed(i, state: Softmax) -> Softmax:
        first = pieces.order[i] * reads.piece
        start = jnp.minimum(first, slots - reads.piece)  # the last piece overlaps the one before it
        here = start + jnp.arange(reads.piece) >= first
        valid = here & (lax.dynamic_slice_in_dim(cache.positions, start, reads.piece, 1) >= 0)
        segments = jnp.zeros((rows, T), jnp.int32), (~valid).astype(jnp.int32)  # empty slots are another segment
        kernel = {"kernel": "xla"} if options.get("kernel") == "cudnn" else {}  # holes are not causal
        return attend(state, start, segment_ids=segments, **kernel)

    state = vary_like(online_softmax.init((rows, T, H), d), q, cache.k, pieces)
    whole_pieces = pieces.counts[0]
    mixed_pieces = pieces.counts[1]
    with jax.named_scope(f"at_most_{reads.pieces}_trips"):
        state = lax.fori_loop(jnp.int32(0), whole_pieces, whole, state)
    if reads.holes:
        with jax.named_scope(f"at_most_{reads.pieces}_trips"):
            state = lax.fori_loop(whole_pieces, whole_pieces + mixed_pieces, mixed, state)
    state = state if axis is not None else _scattered(state, ring)
    return jax.tree.map(lambda x: x.reshape(B, -1, *x.shape[2:]), state)


def softmax_of(o: Float[Array, "B T H d"], lse: Float32[Array, "B H T"]) -> Softmax:
    """Return the state of rows [B, T, H] from their attention to some keys, and its log-sum-exp."""
    m = lse.swapaxes(1, 2)
    weighs = ~jnp.isneginf(m)
    return Softmax(o.astype(jnp.float32), m, weighs.astype(jnp.float32))


def _scattered(state: Softmax, ring: str) -> Softmax:
    """Merge the states of all queries for each rank's keys, and return those of this rank's queries."""
    highest = lax.pmax(state.m, ring)
    weight = jnp.exp(state.m - jnp.where(jnp.isneginf(highest), 0.0, highest))
    shares = state.o * weight[..., None], state.l * weight
    o, l = (lax.psum_scatter(x, ring, scatter_dimension=1, tiled=True) for x in shares)  # noqa: E741
    T = o.shape[1]
    return Softmax(o, lax.dynamic_slice_in_dim(highest, lax.axis_index(ring) * T, T, axis=1), l)
