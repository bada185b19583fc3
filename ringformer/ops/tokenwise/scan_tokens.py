"""A scan over chunks of the local tokens, for computations per token (feed-forward, loss, embedding)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree, Shaped

from ringformer.ops.argument_checks import AnyArray


def scan_tokens(
    body: Callable[..., Any], carry: PyTree, tokens: PyTree[Shaped[AnyArray, "B T ..."]], chunk: int
) -> tuple[PyTree, PyTree[Shaped[AnyArray, "B T ..."]]]:
    """Scan `body(carry, tokens) -> (carry, y)` over `chunk` tokens at a time; the last chunk may be shorter.

    Args:
      body: gets the next `chunk` tokens of every array (fewer at the end); its y holds arrays [B, t, ...] for those
        tokens.
      carry: the carry that the first call of the body gets.
      tokens: pytree of the arrays to scan.

    Returns:
      The last carry, and the concatenated ys.
    """
    T = jax.tree.leaves(tokens)[0].shape[1]
    n = T // chunk
    ys = []
    if n:
        carry, y = lax.scan(body, carry, jax.tree.map(partial(_cut, n=n, chunk=chunk), tokens))
        ys.append(jax.tree.map(_join, y))
    if T % chunk:
        carry, y = body(carry, jax.tree.map(lambda x: x[:, n * chunk :], tokens))
        ys.append(y)
    return carry, ys[0] if len(ys) == 1 else jax.tree.map(lambda *y: jnp.concatenate(y, axis=1), *ys)


def _cut(x, n, chunk):
    """Cut the first n chunks of x [B, T, ...] into [n, B, chunk, ...]."""
    return x[:, : n * chunk].reshape(x.shape[0], n, chunk, *x.shape[2:]).swapaxes(0, 1)


def _join(x):
    """Reshape [n, B, chunk, ...] to [B, n chunk, ...]."""
    n, B, chunk, *rest = x.shape
    return x.swapaxes(0, 1).reshape(B, n * chunk, *rest)
