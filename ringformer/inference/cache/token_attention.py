"""Attention from one new token of each row to a cache that is sharded over a ring.

All tokens in the cache precede the new ones, so the only mask is whether a slot is valid. A rank without keys for a row
contributes a maximum of -inf and a sum of 0, which leave the merged result unchanged.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from ringformer.inference.cache.arrays import Cache, Entries, LayerCache
from ringformer.ops.tokenwise.words import as_words, joined, parts

ATTEND_TOKEN = "attend_token"
"""Name scope of a token's attention, which distinguishes it from the projections in a compiled program."""

MOST_SUMS = 2
"""Queries per key head up to which GPUs read the cache as words, and sum products query by query. For four or more, a
matrix product is faster; for two and three, this was not measured (`results/gpu.json`)."""


def for_tokens(cache: Cache, queries_per_key: int, platform: str) -> Cache:
    """Return the cache in the form that `attend_token` reads fastest."""
    if platform != "gpu" or queries_per_key > MOST_SUMS:
        return cache
    k, v = (x._replace(values=as_words(x.values)) for x in (cache.k, cache.v))
    if v.scales is not None:
        v = cache.v  # the four sums of int8 words would be two kernels, each of which reads all words
    return cache._replace(k=k, v=v)


@partial(jax.named_call, name=ATTEND_TOKEN)
def attend_token(
    q: Float[Array, "B K G d"],
    k: Float[Array, "B K d"],
    v: Float[Array, "B K d"],
    caches: Sequence[LayerCache],
    ring: str,
    scale: float | None = None,
) -> Float32[Array, "B K G d"]:
    """Attend from one token per row to the cached keys of all ranks, and to the token's own k and v. The token is the
    same on all ranks.

    Communicates one maximum and one sum, 4 B K G (d + 2) bytes in total, regardless of the length of the context.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = [_logits(q, cache, scale) for cache in caches]
    m = logits[0].max(axis=-1)
    for s in logits[1:]:
        m = jnp.maximum(m, s.max(axis=-1))
    shift = jnp.where(jnp.isneginf(m), 0.0, m)[..., None]
    share: Float32[Array, "B K G d+1"] | float = 0.0
    for s, cache in zip(logits, caches, strict=True):
        p = jnp.exp(s - shift)
        share += jnp.concatenate([_weighted(p, cache, v.dtype), p.sum(axis=-1)[..., None]], axis=-1)
    own = scale * jnp.einsum("bkgd,bkd->bkg", q.astype(jnp.float32), k.astype(jnp.float32))
    highest = jnp.maximum(lax.pmax(m, ring), own)  # finite: a token sees itself
    total = lax.psum(share * jnp.exp(m - highest)[..., None], ring)
    weight = jnp.exp(own - highest)[..., None]
    return (total[..., :-1] + weight * v[:, :, None].astype(jnp.float32)) / (total[..., -1:] + weight)


def _logits(q: Float[Array, "B K G d"], cache: LayerCache, scale: float) -> Float32[Array, "B K G S"]:
    """Compute the scaled logits, -inf for empty slots."""
    keys = cache.k.values
    if keys.dtype == jnp.uint32:
        s = scale * _summed_logits(q.astype(jnp.float32), parts(keys, _narrow(cache.k)))
    else:
        s = scale * _unfolded(_einsum("bkgd,bksd->bkgs", _folded(q, keys), keys.astype(q.dtype)), q)
    if cache.k.scales is not None:
        s *= cache.k.scales[:, :, None]
    return jnp.where(cache.valid[:, None, None], s, -jnp.inf)


def _weighted(p: Float32[Array, "B K G S"], cache: LayerCache, dtype) -> Float32[Array, "B K G d"]:
    """Sum the values, weighted by p."""
    values = cache.v.values
    if cache.v.scales is not None:
        p *= cache.v.scales[:, :, None]
    if cache.k.values.dtype == jnp.uint32:
        return _summed_values(p, parts(values, _narrow(cache.v)))
    return _unfolded(_einsum("bkgs,bksd->bkgd", _folded(p, values).astype(dtype), values.astype(dtype)), p)


def _folded(x: Float[Array, "B K G n"], entries: Float[Array, "R K S d"]) -> Float[Array, "R K rows n"]:
    """Make the rows that share one row of a cache (R = 1) rows of it."""
    return x if len(entries) == len(x) else rearrange(x, "b k g n -> 1 k (b g) n")


def _unfolded(x: Float[Array, "R K rows n"], like: Float[Array, "B K G m"]) -> Float[Array, "B K G n"]:
    return x if len(x) == len(like) else rearrange(x, "1 k (b g) n -> b k g n", b=len(like))


def _summed_logits(q: Float32[Array, "B K G d"], keys: list[Float32[Array, "B K S w"]]) -> Float32[Array, "B K G S"]:
    n = len(keys)

    def of_query(q):
        return sum((q[:, :, None, i::n] * part for i, part in enumerate(keys)), start=jnp.float32(0)).sum(axis=-1)

    return jnp.stack([of_query(q[:, :, g]) for g in range(q.shape[2])], axis=2)


def _summed_values(p: Float32[Array, "B K G S"], values: list[Float32[Array, "B K S w"]]) -> Float32[Array, "B K G d"]:
    def of_query(p):
        return joined([(p[..., None] * part).sum(axis=-2) for part in values])

    return jnp.stack([of_query(p[:, :, g]) for g in range(p.shape[2])], axis=2)


def _narrow(entries: Entries) -> DTypeLike:
    """Return the dtype of the numbers in words of entries."""
    return jnp.bfloat16 if entries.scales is None else jnp.int8


def _einsum(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
