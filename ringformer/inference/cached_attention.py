"""Attention to a cache that lies over a ring: of one new token of each row, and of a chunk of new tokens.

All that is in the cache comes before what is new, so that validity is the whole mask. A rank without keys for a row
has the maximum -inf there and the sum 0, and merges to nothing.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.ring_attention import ring_attention

Travels = Literal["keys", "queries"]
"""What goes round the ring when a chunk of queries meets the cache."""

ATTEND_TOKEN = "attend_token"
"""The name scope of a token's attention, by which a compiled program tells it from the projections around it."""


def cheaper_to_move(config: LlamaConfig, new: int, cached: int) -> Travels:
    """What is less to move: the keys and values of what is cached, or the queries of what is new and their outputs."""
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
) -> Float32[Array, "B K G d"]:
    """One query a row, the same on all ranks, to the rank's share of the keys and to its own k and v: the whole result.

    What travels is one maximum and one sum, 4 B K G (d + 2) bytes, whatever the context.
    """
    scale = q.shape[-1] ** -0.5

    def weights(s):
        """The logits' maximum, and their exponentials under it."""
        m = s.max(axis=-1)
        return m, jnp.exp(s - _shift(m)[..., None])

    def dot(spec, a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    m, p = weights(jnp.where(valid[:, None, None], scale * dot("bkgd,bksd->bkgs", q, cached_k), -jnp.inf))
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
    """(o, lse) of this rank's queries to the valid keys of all ranks' shares; `options` are `ring_attention`'s."""
    k, v = (rearrange(x, "b k s d -> b s k d") for x in (cached_k, cached_v))
    keys = jnp.where(valid, 0, 1)  # segments: the queries are of segment 0
    options |= {"causal": False, "return_lse": True}
    if travels == "keys":
        ids = jnp.zeros(q.shape[:2], jnp.int32), keys
        o, lse = ring_attention(q, k, v, axis_name=ring, segment_ids=ids, **options)
        return o.astype(jnp.float32), lse
    q = lax.all_gather(q, ring, axis=1, tiled=True)
    ids = jnp.zeros(q.shape[:2], jnp.int32), keys
    o, lse = ring_attention(q, k, v, axis_name=None, segment_ids=ids, **options)
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
    """The attention of queries to two sets of keys, from (o, lse) of each. Each query sees a key of one of them."""
    (x, left), (y, right) = a, b
    left, right = (jnp.exp(w - jnp.maximum(left, right)).swapaxes(1, 2)[..., None] for w in (left, right))
    return (x * left + y * right) / (left + right)


def _shift(m: jax.Array) -> jax.Array:
    """A maximum to subtract: 0 of a row without keys, where -inf would give nan."""
    return jnp.where(jnp.isneginf(m), 0.0, m)
