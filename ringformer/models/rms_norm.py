"""Root mean square normalisation (Zhang & Sennrich)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Module of `rms_norm` with a learned scale."""

    def __init__(self, features: int, eps: float, offset: float = 0.0):
        self.eps = eps
        self.offset = offset
        self.scale: nnx.Param[Any] = nnx.Param(jnp.full(features, 1 - offset, jnp.float32), letters="D")

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return rms_norm(x, self.scale[...], self.eps, self.offset)


def normed(norm: RMSNorm | None, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Return x normalised, or x itself where a family has no norm."""
    return x if norm is None else norm(x)


def rms_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], eps: float, offset: float = 0.0
) -> Float[Array, "*rows D"]:
    """Divide x by the root of its mean square and multiply by `offset` plus the scale, in float32; return x's dtype."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (scale if offset == 0 else offset + scale)).astype(x.dtype)
