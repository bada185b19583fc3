"""Dense attention and cross-entropy in plain JAX: the model's vanilla attention, and a reference for tests.

Tests compare every optimised op of this package, and its gradients, with these functions; benchmarks use them as a
baseline. They materialize the [T, S] and [T, V] logits and compute in the dtype of their inputs, at least float32. (The
tests' second reference, `tests/dense.py`, is numpy in float64 with explicit gradients.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringformer.ops.argument_checks import AnyArray, SegmentIds


def dense_attention(
    q: Float[AnyArray, "B T H d"],
    k: Float[AnyArray, "B S K d"],
    v: Float[AnyArray, "B S K d"],
    *,
    causal: bool = True,
    segment_ids: SegmentIds = None,
    bias: Float[AnyArray, "B S"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[AnyArray, " H"] | None = None,
    logit_softcap: float | None = None,
    attend_first: int = 0,
    return_lse: bool = False,
) -> Float[Array, "B T H d"] | tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """Compute softmax attention with full logits (section 2 of the paper); arguments as in `ring_attention`.

    Query head h reads key head h // (H // K). o has q's dtype; a row that sees no key is 0 (and its lse -inf, or its
    sink).
    """
    B, T, H, d = q.shape
    S, K = k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    wide = jnp.promote_types(q.dtype, jnp.float32)  # bfloat16 logits would be neither a reference nor a fair baseline
    grouped = q.reshape(B, T, K, H // K, d)
    s = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=wide) * scale
    if logit_softcap is not None:
        s = logit_softcap * jnp.tanh(s / logit_softcap)
    if bias is not None:
        s = s + bias[:, None, None, None, :]
    mask = jnp.ones((B, T, S), bool)
    age = jnp.arange(T)[:, None] - jnp.arange(S)
    if causal:
        mask &= age >= 0
    if window is not None:
        mask &= (age < window) | (jnp.arange(S) < attend_first)
    if segment_ids is not None:
        q_ids, k_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        mask &= q_ids[:, :, None] == k_ids[:, None, :]
    mask = mask[:, None, None]
    s = jnp.where(mask, s, -jnp.inf)
    # Divide by the denominator: exp(s - lse) would lose log(denominator) next to a large maximum.
    m = s.max(axis=-1, keepdims=True)
    of_heads = None if sinks is None else jnp.asarray(sinks, wide).reshape(1, K, H // K, 1, 1)
    m = jax.lax.stop_gradient(m if of_heads is None else jnp.maximum(m, of_heads))
    shift = jnp.where(jnp.isneginf(m), 0.0, m)  # an empty row: exp(-inf - 0) = 0
    p = jnp.exp(s - shift)
    total = p.sum(axis=-1, keepdims=True)
    if of_heads is not None:
        total += jnp.exp(of_heads - shift)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    o = jnp.einsum("bkgts,bskd->btkgd", p / total, v).reshape(q.shape).astype(q.dtype)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(total))
    return (o, lse.reshape(B, H, T)) if return_lse else o


def dense_cross_entropy(
    x: Float[Array, "B T D"], head: Float[Array, "D V"], targets: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Sum -log softmax(x head)[target] over the tokens where mask is true, in nats."""
    log_p = jax.nn.log_softmax(x @ head, axis=-1)
    return -jnp.where(mask, jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0], 0.0).sum()
