"""Feed-forward computed block by block along the local sequence (Blockwise Parallel Transformer, section 3).

The [T, F] hidden activation never exists: the forward keeps one chunk of it, the backward recomputes a chunk from
its input and adds up the weights' gradients in float32, whatever the compute dtype.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.vma import vary, vary_like, varying_axes


def swiglu(weights: tuple[jax.Array, jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """`(silu(x w_gate) * (x w_up)) w_down`: x [B, T, D], weights [D, F], [D, F], [F, D]."""
    w_gate, w_up, w_down = weights
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def blockwise_feedforward(function: Callable, weights, x: jax.Array, chunk: int) -> jax.Array:
    """`function(weights, x)` for a function of each token alone, `chunk` tokens of x [B, T, ...] at a time.

    The last chunk may be shorter. Differentiable in weights (a pytree) and x.
    """
    axes = varying_axes(weights, x)
    return _blockwise(function, chunk, vary(weights, axes), vary(x, axes))


def split(x: jax.Array, chunk: int) -> tuple[jax.Array | None, jax.Array | None]:
    """x [B, T, ...] as whole chunks [T // chunk, B, chunk, ...] and the shorter rest [B, T % chunk, ...], or None."""
    B, T, *rest = x.shape
    whole = T // chunk
    chunks = x[:, : whole * chunk].reshape(B, whole, chunk, *rest).swapaxes(0, 1) if whole else None
    return chunks, (x[:, whole * chunk :] if T % chunk else None)


def join(chunks: jax.Array | None, rest: jax.Array | None) -> jax.Array:
    """The inverse of `split`."""
    if chunks is None:
        return rest
    n, B, chunk, *tail = chunks.shape
    whole = chunks.swapaxes(0, 1).reshape(B, n * chunk, *tail)
    return whole if rest is None else jnp.concatenate([whole, rest], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(function, chunk, weights, x):
    chunks, rest = split(x, chunk)
    y = None if chunks is None else lax.map(partial(function, weights), chunks)
    return join(y, None if rest is None else function(weights, rest))


def _forward(function, chunk, weights, x):
    return _blockwise(function, chunk, weights, x), (weights, x)


def _backward(function, chunk, residuals, dy):
    weights, x = residuals

    def one(total, chunk):
        x, dy = chunk
        dweights, dx = jax.vjp(function, weights, x)[1](dy)
        return jax.tree.map(lambda t, d: t + d.astype(jnp.float32), total, dweights), dx

    total = jax.tree.map(lambda w: vary_like(jnp.zeros(w.shape, jnp.float32), w), weights)
    (xs, x_rest), (dys, dy_rest) = split(x, chunk), split(dy, chunk)
    dxs = dx_rest = None
    if xs is not None:
        total, dxs = lax.scan(one, total, (xs, dys))
    if x_rest is not None:
        total, dx_rest = one(total, (x_rest, dy_rest))
    return jax.tree.map(lambda w, t: t.astype(w.dtype), weights, total), join(dxs, dx_rest)


_blockwise.defvjp(_forward, _backward)
