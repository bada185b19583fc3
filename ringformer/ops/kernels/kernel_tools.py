"""Shared tools of the TPU kernels: products, copies, registers."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
"""Shape of a vector register of 32-bit values."""

ROWS_BY_ROWS, ROWS_BY_COLUMNS, COLUMNS_BY_COLUMNS = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))
"""Dimensions of a and b that a product sums over: a b^T, a b, a^T b."""


def matmul(a: jax.Array, b: jax.Array, contract: tuple) -> jax.Array:
    """Multiply with float32 sums; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


class OnChip(NamedTuple):
    """Arrays of a kernel in VMEM."""

    blocks: dict[str, tuple[pl.BlockSpec, Any]]
    """Blocks and dtypes of operands and results by name; Pallas keeps two buffers for each."""
    scratch: dict[str, Any]
    logits: int
    """Largest number of float32 logits that a grid step holds in addition."""

    @property
    def bytes(self) -> int:
        """Most bytes that the kernel needs."""
        arrays = [x for x in self.scratch.values() if jnp.issubdtype(x.dtype, jnp.number)]
        blocks = sum(2 * _padded_bytes(spec.block_shape, dtype) for spec, dtype in self.blocks.values())
        return blocks + sum(_padded_bytes(x.shape, x.dtype) for x in arrays) + 4 * self.logits

    @property
    def limit(self) -> int | None:
        """Return the limit to request from the compiler, a quarter more than needed; None if its default of 16 MiB
        suffices."""
        return None if 1.25 * self.bytes < 15 * 2**20 else int(1.25 * self.bytes)


class Logits(NamedTuple):
    """Logits of a pair in units of log 2, from the products of queries and keys."""

    scale: float
    softcap: float | None = None
    """Bound c: a logit s becomes c tanh(s / c)."""
    window: int | None = None
    """Keys that a query of a masked pair sees at most."""


def _padded_bytes(shape: Any, dtype: Any) -> int:
    """Bytes of an array in VMEM, padded to whole registers: the last dimension to lanes, the one before it to sublanes.
    A dimension of None is 1."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, columns = (n or 1 for n in (1, 1, *shape))
    sublanes = SUBLANES * 4 // size
    return math.prod(outer) * (-(-rows // sublanes) * sublanes) * (-(-columns // LANES) * LANES) * size


def grid_over_heads(on_chip: OnChip) -> pltpu.CompilerParams:
    """Return the compiler's parameters for a grid of batch, key heads and pairs."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=on_chip.limit
    )


def part_of_keys(Tq: int, Tk: int) -> int:
    """Keys of a chunk whose logits the backward holds at a time: half of them, or fewer to stay within 2 MiB."""
    length = Tk // 2
    while length * Tq > 2**19 and length % 32 == 0:
        length //= 2
    return length


def like(x: jax.Array, varying: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of an output: shape and dtype of x, varying over the same mesh axes as `varying`."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(varying).manual_axis_type)


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
