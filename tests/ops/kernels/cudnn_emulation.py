"""cuDNN's calls in plain JAX: the same signatures, and numbers rounded where cuDNN rounds them."""

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
        def call(q, k, *others, causal):
            called.append((kind, q.shape, k.shape, causal))
            return function(q, k, *others, causal=causal)

        monkeypatch.setattr(cudnn_calls, kind, call)

    record("forward", forward)
    record("backward", backward)
    return called


def forward(q, k, v, scale, causal):
    """Weights rounded for their product, o rounded, lse float32."""
    s = _logits(q, k, scale, causal)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None]).astype(q.dtype)
    o = jnp.einsum("bkgts,bskd->btkgd", p, v, preferred_element_type=jnp.float32)
    return rearrange(o, "b t k g d -> b t (k g) d").astype(q.dtype), rearrange(lse, "b k g t -> b (k g) t")


def backward(q, k, v, o, lse, do, scale, causal):
    """p and ds rounded for their products, results rounded; delta of o and do as they are given."""
    K = k.shape[2]
    s, grouped, out = _logits(q, k, scale, causal), _grouped(q, K), _grouped(do, K)
    p = jnp.exp(s - rearrange(lse, "b (k g) t -> b k g t", k=K)[..., None])
    delta = (_grouped(o, K).astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    dp = jnp.einsum("bkgtd,bskd->bkgts", out, v, preferred_element_type=jnp.float32)
    ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
    f32 = dict(preferred_element_type=jnp.float32)
    dq = rearrange(jnp.einsum("bkgts,bskd->btkgd", ds, k, **f32), "b t k g d -> b t (k g) d")
    dk = jnp.einsum("bkgts,bkgtd->bskd", ds, grouped, **f32)
    dv = jnp.einsum("bkgts,bkgtd->bskd", p.astype(q.dtype), out, **f32)
    return tuple(x.astype(q.dtype) for x in (dq, dk, dv))


def _grouped(x, K):
    return rearrange(x, "b t (k g) d -> b k g t d", k=K)


def _logits(q, k, scale, causal):
    T, S = q.shape[1], k.shape[1]
    s = jnp.einsum("bkgtd,bskd->bkgts", _grouped(q, k.shape[2]), k, preferred_element_type=jnp.float32) * scale
    return jnp.where(jnp.tril(jnp.ones((T, S), bool)), s, -jnp.inf) if causal else s
