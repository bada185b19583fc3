"""Softmax attention and its gradients in numpy, float64: an oracle that shares no line and no library with the package.

For errors of rounding, which an oracle in float32 could not measure, and for gradients that do not rest on autodiff.
(`ringformer/ops/dense_reference.py` is JAX: it runs in a model, is differentiated, and takes rows without keys.)
"""

import numpy as np


def attention(
    inputs,
    cotangents=None,
    segment_ids=None,
    *,
    causal=True,
    scale=None,
    logits=np.float64,
    window=None,
    logit_softcap=None,
    attend_first=0,
) -> dict:
    """o, lse and, given cotangents, dq, dk, dv, dbias, dsinks, float64; every row must see a key.

    Args:
      inputs: q [B, T, H, d], k and v [B, S, K, d], perhaps bias [B, S] and sinks [H]; any float dtype, read as they
        are.
      cotangents: do [B, T, H, d], dlse [B, H, T].
      segment_ids: [B, T] and [B, S], or None.
      logits: the dtype that logits are rounded to before the bias is added, and after.
    """
    q, k, v = (np.asarray(inputs[x]).astype(np.float64) for x in "qkv")
    (T, H, d), (S, K) = q.shape[1:], k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    k, v = (np.repeat(x, H // K, axis=2) for x in (k, v))
    s = (scale * np.einsum("bthd,bshd->bhts", q, k, optimize=True)).astype(logits)
    slope = 1.0
    if logit_softcap is not None:
        slope = 1.0 / np.cosh(s / logit_softcap) ** 2
        s = logit_softcap * np.tanh(s / logit_softcap)
    if "bias" in inputs:
        s = s + np.asarray(inputs["bias"])[:, None, None, :].astype(logits)
    seen = np.tril(np.ones((T, S), bool)) if causal else np.ones((T, S), bool)
    if window is not None:
        age = np.arange(T)[:, None] - np.arange(S)
        seen = seen & ((age < window) | (np.arange(S) < attend_first))
    if segment_ids is not None:
        seen = seen & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
    s = np.where(seen, s.astype(np.float64), -np.inf)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    if "sinks" in inputs:
        of_sinks = np.exp(np.asarray(inputs["sinks"]).astype(np.float64)[:, None, None] - m)
        total = total + of_sinks
        of_sinks = of_sinks / total
    p /= total
    out = dict(o=np.einsum("bhts,bshd->bthd", p, v, optimize=True), lse=(m + np.log(total))[..., 0])
    if cotangents is None:
        return out
    do, dlse = (np.asarray(cotangents[x]).astype(np.float64) for x in ("do", "dlse"))
    dp = np.einsum("bthd,bshd->bhts", do, v, optimize=True)
    mean = (p * dp).sum(axis=-1, keepdims=True)
    ds = p * (dp - mean + dlse[..., None])
    if "sinks" in inputs:
        out["dsinks"] = (of_sinks * (dlse[..., None] - mean)).sum(axis=(0, 2, 3))
    of_bias, ds = ds, ds * slope
    by_key_head = lambda x: x.reshape(*x.shape[:2], K, H // K, d).sum(axis=3)  # noqa: E731
    out["dq"] = scale * np.einsum("bhts,bshd->bthd", ds, k, optimize=True)
    out["dk"] = by_key_head(scale * np.einsum("bhts,bthd->bshd", ds, q, optimize=True))
    out["dv"] = by_key_head(np.einsum("bhts,bthd->bshd", p, do, optimize=True))
    if "bias" in inputs:
        out["dbias"] = of_bias.sum(axis=(1, 2))
    return out
