"""Attention to a cache that is sharded over a ring, for one new token of each row or for a chunk of new tokens.

All tokens in the cache precede the new tokens, so the only mask is whether a slot is valid. A rank without keys for a
row contributes a maximum of -inf and a sum of 0, which leave the merged result unchanged.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops.ring_attention import ring_attention

Travels = Literal["keys", "queries"]
"""Arrays that travel around the ring when a chunk of queries attends to the cache."""

ATTEND_TOKEN = "attend_token"
"""Name scope of a token's attention, which distinguishes it from the projections in a compiled program."""


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
) -> Float32[Array, "B K G d"]:
    """Attend from one token per row to the cached keys of all ranks and to the token's own k and v. The token is the
    same on all ranks.

    Communicates one maximum and one sum, 4 B K G (d + 2) bytes in total, regardless of the length of the context.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def dot(spec, a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    logits = jnp.where(valid[:, None, None], scale * dot("bkgd,bksd->bkgs", q, cached_k), -jnp.inf)
    m = logits.max(axis=-1)
    p = jnp.exp(logits - _shift(m)[..., None])
    share = jnp.concatenate([dot("bkgs,bksd->bkgd", p.astype(v.dtype), cached_v), p.sum(axis=-1)[..., None]], axis=-1)
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


def join(
    a: tuple[Float[Array, "B T H d"], Float32[Array, "B H T"]],
    b: tuple[Float[Array, "B T H d"], Float32[Array, "B H T"]],
) -> Float32[Array, "B T H d"]:
    """Merge the attention of the same queries to two sets of keys from (o, lse) of each. Each query must see at least
    one key."""
    (x, left), (y, right) = a, b
    left, right = (jnp.exp(w - jnp.maximum(left, right)).swapaxes(1, 2)[..., None] for w in (left, right))
    return (x * left + y * right) / (left + right)


def _shift(m: jax.Array) -> jax.Array:
    """Return the maximum to subtract: 0 for a row without keys, where -inf would give NaN."""
    return jnp.where(jnp.isneginf(m), 0.0, m)
