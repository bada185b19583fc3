"""Attention from one new token of each row to a cache that is sharded over a ring.

All tokens in the cache precede the new ones, so the only mask is whether a slot is valid. A rank without keys for a row
contributes a maximum of -inf and a sum of 0, which leave the merged result unchanged.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ringformer.inference.cache.arrays import LayerCache

ATTEND_TOKEN = "attend_token"
"""Name scope of a token's attention, which distinguishes it from the projections in a compiled program."""

MOST_SUMS = 4
"""Query rows per key head up to which GPUs sum products row by row, reading the cache where it lies. For more rows, a
matrix product is faster, although XLA copies a layer's slots before it (`results/gpu.json`)."""


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
    shared = cache.k.values.shape[0] < q.shape[0]

    def product(q, keys):
        spec = "bkgd,ksd->bkgs" if shared else "bkgd,bksd->bkgs"
        return _einsum(spec, q, (keys[0] if shared else keys).astype(q.dtype))

    def sums(q, keys):
        q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
        return jnp.stack([(q[:, :, g, None] * keys).sum(axis=-1) for g in range(q.shape[2])], axis=2)

    s = scale * _by_platform(q, sums, product, shared)(q, cache.k.values)
    if cache.k.scales is not None:
        s *= cache.k.scales[:, :, None]
    return jnp.where(cache.valid[:, None, None], s, -jnp.inf)


def _weighted(p: Float32[Array, "B K G S"], cache: LayerCache, dtype) -> Float32[Array, "B K G d"]:
    """Sum the values, weighted by p."""
    shared = cache.v.values.shape[0] < p.shape[0]
    if cache.v.scales is not None:
        p *= cache.v.scales[:, :, None]

    def product(p, values):
        spec = "bkgs,ksd->bkgd" if shared else "bkgs,bksd->bkgd"
        return _einsum(spec, p.astype(dtype), (values[0] if shared else values).astype(dtype))

    def sums(p, values):
        values = values.astype(jnp.float32)
        return jnp.stack([(p[:, :, g, :, None] * values).sum(axis=-2) for g in range(p.shape[2])], axis=2)

    return _by_platform(p, sums, product, shared)(p, cache.v.values)


def _by_platform(rows: jax.Array, sums, product, shared: bool):
    """Choose how to multiply rows [B, K, G, ...] by cached entries: by `sums` on GPUs if there are few."""
    few = rows.shape[2] <= MOST_SUMS and not shared
    return partial(lax.platform_dependent, cuda=sums, default=product) if few else product


def _einsum(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
