"""A scan over chunks of the local tokens, for what is computed of each token alone (feed-forward, loss, embedding)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree, Shaped

from ringformer.ops.argument_checks import AnyArray


def scan_tokens(
    body: Callable, carry: PyTree, tokens: PyTree[Shaped[AnyArray, "B T ..."]], chunk: int
) -> tuple[PyTree, PyTree[Shaped[AnyArray, "B T ..."]]]:
    """`lax.scan` of `body(carry, tokens) -> (carry, y)` over `chunk` tokens at a time; the last may be fewer.

    Args:
      body: sees `chunk` tokens of every array, or the rest; y holds arrays [B, t, ...] of as many tokens.
      carry: what the first call of the body is given.
      tokens: the arrays to walk along, as deep as you like.

    Returns:
      The last carry, and the ys put together.
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
