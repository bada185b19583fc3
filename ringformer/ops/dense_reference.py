"""Dense attention and cross-entropy in JAX, as plain as they can be written: the paper's vanilla attention, and an oracle.

Every optimised op of this package, its gradients by autodiff included, is tested against them, and benchmarks compare
with them. They hold the [T, S] and [T, V] logits, and compute in the dtype that they are given, at least float32. (The
tests' second oracle, `tests/dense.py`, is numpy in float64, with its gradients written out.)
"""

import jax
import jax.numpy as jnp


def dense_attention(q, k, v, *, causal=True, segment_ids=None, bias=None, scale=None, return_lse=False):
    """Softmax attention with whole logits (section 2 of the paper).

    Args:
      q: [B, T, H, d].
      k, v: [B, S, K, d]; query head h reads key head h // (H // K).
      causal: query t sees keys s <= t; needs T == S.
      segment_ids: int [B, T], or a pair ([B, T], [B, S]); a query sees only keys of its own segment.
      bias: [B, S], added to the scaled logits of every query.
      scale: factor of the logits, default 1/sqrt(d).
      return_lse: also return the log-sum-exp of every row, [B, H, T].

    Returns:
      o [B, T, H, d] in q's dtype; a row that sees nothing is 0 (and its lse -inf).
    """
    B, T, H, d = q.shape
    S, K = k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    wide = jnp.promote_types(q.dtype, jnp.float32)  # bfloat16 logits would be no oracle, and no honest baseline
    grouped = q.reshape(B, T, K, H // K, d)
    s = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=wide) * scale
    if bias is not None:
        s = s + bias[:, None, None, None, :]
    mask = jnp.ones((B, T, S), bool)
    if causal:
        mask &= jnp.arange(T)[:, None] >= jnp.arange(S)
    if segment_ids is not None:
        q_ids, k_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        mask &= q_ids[:, :, None] == k_ids[:, None, :]
    mask = mask[:, None, None]
    s = jnp.where(mask, s, -jnp.inf)
    # By maximum and denominator: exp(s - lse) would lose log(denominator) beside a large maximum.
    m = jax.lax.stop_gradient(s.max(axis=-1, keepdims=True))
    p = jnp.exp(s - jnp.where(jnp.isneginf(m), 0.0, m))  # an empty row: exp(-inf - 0) = 0
    total = p.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    o = jnp.einsum("bkgts,bskd->btkgd", p / total, v).reshape(q.shape).astype(q.dtype)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(total))
    return (o, lse.reshape(B, H, T)) if return_lse else o


def dense_cross_entropy(x, head, targets, mask):
    """Sum over the tokens with mask of -log softmax(x head)[target]; x [B, T, D], head [D, V]."""
    log_p = jax.nn.log_softmax(x @ head, axis=-1)
    return -jnp.where(mask, jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0], 0.0).sum()
