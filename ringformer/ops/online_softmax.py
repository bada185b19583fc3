"""Softmax-weighted sums over keys that arrive in blocks (Milakov & Gimelshein; section 2 of the paper).

State per query row: the running maximum `m` of its logits, the denominator `l = sum exp(s - m)` and the
numerator `o = sum exp(s - m) v`, all float32. A row that has seen no key has m = -inf, l = 0, o = 0, or with a sink
m = the sink, l = 1.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


class Softmax(NamedTuple):
    """State of the rows of queries."""

    o: Float32[Array, "*rows d"]  # not yet divided by l
    m: Float32[Array, "*rows"]
    l: Float32[Array, "*rows"]  # noqa: E741 - the field's name for the denominator


def init(rows: tuple[int, ...], d: int, sinks: Float32[Array, "K G"] | None = None) -> Softmax:
    """Make the initial state of rows of this shape, which have seen no key; values have d features.

    `sinks` are logits that take weight and have no value, one per head of rows [B, K, G, T]. A row that sees no key
    then has lse = its sink.
    """
    o = jnp.zeros((*rows, d), jnp.float32)
    if sinks is None:
        return Softmax(o, m=jnp.full(rows, -jnp.inf, jnp.float32), l=jnp.zeros(rows, jnp.float32))
    m = jnp.broadcast_to(sinks[None, :, :, None], rows)
    weighs = ~jnp.isneginf(m)
    return Softmax(o, m, l=weighs.astype(jnp.float32))


def capped(s: Float32[Array, "*logits"], cap: float) -> tuple[Float32[Array, "*logits"], Float32[Array, "*logits"]]:
    """Return cap tanh(s / cap), which stays within the cap, and its derivative."""
    tanh = jnp.tanh(s / cap)
    return cap * tanh, 1.0 - tanh * tanh


def update(state: Softmax, s: Float32[Array, "B K G T S"], v: Float[Array, "B K S d"]) -> Softmax:
    """Add a block of keys for rows [B, K, G, T]: its logits `s` (-inf: hidden) and its values `v`."""
    m = jnp.maximum(state.m, s.max(axis=-1))
    # A row whose logits are all -inf so far must yield exp(-inf - 0) = 0, not exp(-inf + inf) = nan.
    shift = jnp.where(jnp.isneginf(m), 0.0, m)
    p = jnp.exp(s - shift[..., None])
    correction = jnp.exp(state.m - shift)
    pv = jnp.einsum("bkgts,bksd->bkgtd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Softmax(o=state.o * correction[..., None] + pv, m=m, l=state.l * correction + p.sum(axis=-1))


def join(a: Softmax, b: Softmax, log_unit: float = 1.0) -> Softmax:
    """Merge two states of the same rows for different keys; rows of `a` with l = 0 are taken from `b`. One unit of m is
    `log_unit` of a logit: kernels that compute 2^x keep m in ln 2."""
    m = jnp.maximum(a.m, b.m)
    shift = jnp.where(jnp.isneginf(m), 0.0, m)
    x, y = (jnp.exp(log_unit * (s.m - shift)) for s in (a, b))
    begun = a.l > 0.0  # constant for a fresh state, so compilers drop the merge
    return Softmax(
        o=jnp.where(begun[..., None], a.o * x[..., None] + b.o * y[..., None], b.o),
        m=m,
        l=jnp.where(begun, a.l * x + b.l * y, b.l),
    )


def output(state: Softmax) -> Float32[Array, "*rows d"]:
    """Return the weighted mean of the values; 0 for rows that have seen no key."""
    return state.o / jnp.where(state.l == 0.0, 1.0, state.l)[..., None]


def log_sum_exp(m: Float32[Array, "*rows"], l: Float32[Array, "*rows"]) -> Float32[Array, "*rows"]:  # noqa: E741
    """Return lse = m + log l; -inf for rows that have seen no key.

    Where |m| is large, float32 has no digits left for log l, so probabilities are computed as exp(s - m) / l
    (`shift_and_weight`), never as exp(s - lse).
    """
    return jnp.where(l == 0.0, -jnp.inf, m + jnp.log(jnp.where(l == 0.0, 1.0, l)))


def shift_and_weight(
    m: Float32[Array, "*rows"],
    l: Float32[Array, "*rows"],  # noqa: E741
) -> tuple[Float32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Return `(shift, weight)` such that the final probabilities are exp(s - shift) * weight; both are 0 for rows
    without keys."""
    empty = l == 0.0
    return jnp.where(empty, 0.0, m), jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, l))
