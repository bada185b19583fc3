"""Shared tools of the TPU kernels: products, copies, registers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
SUBLANES = 8
"""Shape of a vector register of 32-bit values."""

ROWS_BY_ROWS = ((1,), (1,))
ROWS_BY_COLUMNS = ((1,), (0,))
COLUMNS_BY_COLUMNS = ((0,), (0,))
"""Dimensions of a and b that a product sums over: a b^T, a b, a^T b."""


def matmul(a: jax.Array, b: jax.Array, contract: tuple) -> jax.Array:
    """Multiply with float32 sums; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


class Logits(NamedTuple):
    """Logits of a pair in units of log 2, from the products of queries and keys."""

    scale: float
    softcap: float | None = None
    """Bound c: a logit s becomes c tanh(s / c)."""
    window: int | None = None
    """Keys that a query of a masked pair sees at most."""


def part_of_keys(Tq: int, Tk: int) -> int:
    """Keys of a chunk whose logits the backward holds at a time: half of them, or fewer to stay within 2 MiB."""
    length = Tk // 2
    while length * Tq > 2**19 and length % 32 == 0:
        length //= 2
    return length


def for_each_head(G: int, head) -> None:
    """Run `head(g)` for each query head of a key head."""
    if G == 1:
        head(0)
    else:
        lax.fori_loop(0, G, lambda g, _: head(g), None)


def start(copies) -> None:
    for copy in copies:
        copy.start()


def wait(copies) -> None:
    """Wait for these copies: until as many bytes have arrived as they move."""
    for copy in copies:
        copy.wait()


def column(row: jax.Array) -> jax.Array:
    """Turn a row [1, T] into a column [T, 128] that is the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def repeated(x: jax.Array, n: int) -> jax.Array:
    """Widen an array [T, 128] that is the same in every lane to [T, n]."""
    return jnp.concatenate([x] * (n // LANES), axis=1)


def sees(offset: jax.Array, used: jax.Array, keys: slice, Tq: int, window: int | None = None) -> jax.Array:
    """Mask [keys, Tq] of the keys s that query t of a pair sees: t + offset >= s, among the first `used` keys, and
    s > t + offset - window."""
    key = lax.broadcasted_iota(jnp.int32, (keys.stop - keys.start, LANES), 0) + keys.start
    key = jnp.where(key < used, key, jnp.iinfo(jnp.int32).max)
    newest = lax.broadcasted_iota(jnp.int32, (1, Tq), 1) + offset
    visible = newest >= repeated(key, Tq)
    return visible if window is None else visible & (newest - window < repeated(key, Tq))


def capped(s: jax.Array, softcap: float) -> tuple[jax.Array, jax.Array]:
    """Return softcap tanh(s / softcap) and its derivative."""
    tanh = jnp.tanh(s * (1.0 / softcap))
    return softcap * tanh, 1.0 - tanh * tanh
