"""Softmax-weighted sums over keys that arrive in blocks (Milakov & Gimelshein; section 2 of the paper).

State per query row: the running maximum `m` of its logits, the denominator `l = sum exp(s - m)` and the
numerator `o = sum exp(s - m) v`, all float32. A row that has seen nothing holds m = -inf, l = 0, o = 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Softmax(NamedTuple):
    o: jax.Array  # [..., T, d] float32, not yet divided by l
    m: jax.Array  # [..., T] float32
    l: jax.Array  # [..., T] float32  # noqa: E741 - the field's name for the denominator


def init(rows: tuple[int, ...], d: int) -> Softmax:
    """The state of rows of shape [..., T] that have seen no key."""
    return Softmax(
        o=jnp.zeros((*rows, d), jnp.float32),
        m=jnp.full(rows, -jnp.inf, jnp.float32),
        l=jnp.zeros(rows, jnp.float32),
    )


def update(state: Softmax, s: jax.Array, v: jax.Array) -> Softmax:
    """Take in a block of logits `s` [B, K, G, T, S] float32 (-inf: hidden) and its values `v` [B, K, S, d]."""
    m = jnp.maximum(state.m, s.max(axis=-1))
    # A row whose logits are all -inf so far must give exp(-inf - 0) = 0 and not exp(-inf + inf) = nan.
    shift = jnp.where(jnp.isneginf(m), 0.0, m)
    p = jnp.exp(s - shift[..., None])
    correction = jnp.exp(state.m - shift)
    pv = jnp.einsum("bkgts,bksd->bkgtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Softmax(
        o=state.o * correction[..., None] + pv,
        m=m,
        l=state.l * correction + p.sum(axis=-1),
    )


def finish(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """`(o, lse)`, float32: the attention output and the log of the denominator; 0 and -inf for empty rows."""
    empty = state.l == 0.0
    l = jnp.where(empty, 1.0, state.l)  # noqa: E741
    lse = jnp.where(empty, -jnp.inf, state.m + jnp.log(l))
    return state.o / l[..., None], lse
