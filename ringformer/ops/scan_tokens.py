"""A scan over chunks of the local tokens, for what is computed of each token alone (feed-forward, loss, embedding)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def scan_tokens(body: Callable, carry, tokens, chunk: int) -> tuple:
    """`lax.scan` of `body(carry, tokens) -> (carry, y)` over `chunk` tokens at a time; the last may be fewer.

    Args:
      body: sees of every array `chunk` tokens, or the rest; y is a pytree of arrays [B, t, ...] of that many tokens.
      carry: a pytree.
      tokens: a pytree of arrays [B, T, ...].

    Returns:
      The last carry, and the ys put together to [B, T, ...].
    """
    T = jax.tree.leaves(tokens)[0].shape[1]
    n, ys = T // chunk, []
    if n:
        carry, y = lax.scan(body, carry, jax.tree.map(partial(_cut, n=n, chunk=chunk), tokens))
        ys.append(jax.tree.map(_join, y))
    if T % chunk:
        carry, y = body(carry, jax.tree.map(lambda x: x[:, n * chunk :], tokens))
        ys.append(y)
    return carry, ys[0] if len(ys) == 1 else jax.tree.map(lambda *y: jnp.concatenate(y, axis=1), *ys)


def _cut(x, n, chunk):
    """The first n chunks of x [B, T, ...]: [n, B, chunk, ...]."""
    return x[:, : n * chunk].reshape(x.shape[0], n, chunk, *x.shape[2:]).swapaxes(0, 1)


def _join(x):
    """[n, B, chunk, ...] -> [B, n chunk, ...]"""
    n, B, chunk, *rest = x.shape
    return x.swapaxes(0, 1).reshape(B, n * chunk, *rest)
