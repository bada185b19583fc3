"""cuDNN's calls in plain JAX: the same signatures, and numbers rounded where cuDNN rounds them.

Of a rectangle, only the first `lengths` queries and keys are read, and all else in the results is NaN: cuDNN leaves it
undefined.
"""

import jax
import jax.numpy as jnp
import pytest
from einops import rearrange

from ringformer.ops.kernels import cudnn_calls


@pytest.fixture
def emulated(monkeypatch) -> list[tuple]:
    """cuDNN's calls emulated; what was called: kind, shapes of queries and keys, whether causal."""
    called = []

    def record(kind, function):
        def call(q, k, *others):
            *_, causal, lengths, window = others
            mask = causal
            if window:
                mask = ("window", window)
            if lengths is not None:
                mask = "rectangle"
            called.append((kind, q.shape, k.shape, mask))
            return function(q, k, *others)

        monkeypatch.setattr(cudnn_calls, kind, call)

    record("forward", forward)
    record("backward", backward)
    return called


def forward(q, k, v, scale, causal=False, lengths=None, window=None):
    """Weights rounded for their product, o rounded, lse float32."""
    q, k, v = _read(lengths, (q,), (k, v))
    s = _logits(q, k, scale, causal, lengths, window)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None]).astype(q.dtype)
    o = jnp.einsum("bkgts,bskd->btkgd", p, v, preferred_element_type=jnp.float32)
    o, lse = rearrange(o, "b t k g d -> b t (k g) d").astype(q.dtype), rearrange(lse, "b k g t -> b (k g) t")
    return _outside(lengths, jnp.nan, 0, o), _outside(lengths, jnp.nan, 0, lse.swapaxes(1, 2)).swapaxes(1, 2)


def backward(q, k, v, o, lse, do, scale, causal=False, lengths=None, window=None):
    """p and ds rounded for their products, results rounded; delta of o and do as they are given."""
    K = k.shape[2]
    q, o, do, k, v = _read(lengths, (q, o, do), (k, v))
    s, grouped, out = _logits(q, k, scale, causal, lengths, window), _grouped(q, K), _grouped(do, K)
    p = jnp.exp(s - rearrange(lse, "b (k g) t -> b k g t", k=K)[..., None])
    delta = (_grouped(o, K).astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    dp = jnp.einsum("bkgtd,bskd->bkgts", out, v, preferred_element_type=jnp.float32)
    ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
    f32 = dict(preferred_element_type=jnp.float32)
    dq = rearrange(jnp.einsum("bkgts,bskd->btkgd", ds, k, **f32), "b t k g d -> b t (k g) d")
    dk = jnp.einsum("bkgts,bkgtd->bskd", ds, grouped, **f32)
    dv = jnp.einsum("bkgts,bkgtd->bskd", p.astype(q.dtype), out, **f32)
    dq, dk, dv = (x.astype(q.dtype) for x in (dq, dk, dv))
    return _outside(lengths, jnp.nan, 0, dq), *(_outside(lengths, jnp.nan, 1, x) for x in (dk, dv))


def _read(lengths, of_queries, of_keys):
    """What a call reads: zeros outside of the rectangle."""
    return *(_outside(lengths, 0, 0, x) for x in of_queries), *(_outside(lengths, 0, 1, x) for x in of_keys)


def _outside(lengths, value, which, x):
    """Put a value where rows [B, T, ...] lie outside of the rectangle."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1]) < lengths[which][:, None]
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, value)


def _grouped(x, K):
    return rearrange(x, "b t (k g) d -> b k g t d", k=K)


def _logits(q, k, scale, causal, lengths, window):
    T, S = q.shape[1], k.shape[1]
    s = jnp.einsum("bkgtd,bskd->bkgts", _grouped(q, k.shape[2]), k, preferred_element_type=jnp.float32) * scale
    if lengths is not None:
        s = jnp.where((jnp.arange(S) < lengths[1][:, None])[:, None, None, None], s, -jnp.inf)
        return jnp.where((jnp.arange(T) < lengths[0][:, None])[:, None, None, :, None], s, 0.0)
    if not causal:
        return s
    row, column = jnp.arange(T)[:, None], jnp.arange(S)
    return jnp.where((column <= row) & (column > row - (window or T)), s, -jnp.inf)
