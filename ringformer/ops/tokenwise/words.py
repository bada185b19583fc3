"""Arrays of 16-bit or 8-bit numbers as 32-bit words, so that GPUs load several numbers at once.

Kernels that XLA makes for sums of products load one element of an array per thread and instruction. XLA views a whole
array as words without a copy, but would copy part of one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt32

WORD = 4
"""Bytes of a word."""
SUMS = 64
"""Parts of a sum that are computed side by side: for fewer, XLA writes the terms of the sum to memory."""


def as_words(x: Shaped[Array, "*dims n"]) -> Shaped[Array, "*dims words"]:
    """View the last axis of bfloat16 or int8 numbers as words, or return x if it does not fill whole words."""
    count = WORD // x.dtype.itemsize
    if x.dtype not in (jnp.bfloat16, jnp.int8) or x.shape[-1] % count:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, count), jnp.uint32)


def numbers(words: UInt32[Array, "*dims words"], dtype: DTypeLike) -> list[Float32[Array, "*dims words"]]:
    """Return the first number of each word, the second, and so on."""
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return [lax.bitcast_convert_type(x, jnp.float32) for x in (words << 16, words & jnp.uint32(0xFFFF0000))]
    assert dtype == jnp.int8
    signed = lax.bitcast_convert_type(words, jnp.int32)
    return [((signed << (24 - 8 * i)) >> 24).astype(jnp.float32) for i in range(WORD)]


def parts(x: Shaped[Array, "*dims n"], dtype: DTypeLike) -> list[Float32[Array, "*dims words"]]:
    """Return `numbers` of words, or x itself in float32 if it is no array of words."""
    return numbers(x, dtype) if x.dtype == jnp.uint32 else [x.astype(jnp.float32)]


def joined(outputs: list[Float32[Array, "*dims words"]]) -> Float32[Array, "*dims n"]:
    """Put results that belong to the numbers of a word next to one another."""
    first = outputs[0]
    return jnp.stack(outputs, axis=-1).reshape(*first.shape[:-1], -1)


def row_product(x: Float[Array, "1 R"], matrix: UInt32[Array, "R words"]) -> Float32[Array, "1 n"]:
    """Multiply a row by a matrix of words of bfloat16."""
    R, n = matrix.shape
    pieces = math.gcd(R, SUMS)
    row = x[0].astype(jnp.float32)[:, None]
    sums = [(row * part).reshape(pieces, -1, n).sum(axis=1) for part in numbers(matrix, jnp.bfloat16)]
    return joined([y.sum(axis=0) for y in lax.optimization_barrier(sums)])[None]


def product(x: Float[Array, "B R"], matrix: Shaped[Array, "R _"]) -> Float32[Array, "B _"]:
    """Multiply rows by a matrix, which may be words if there is one row."""
    if matrix.dtype == jnp.uint32:
        return row_product(x, matrix)
    return jnp.einsum("br,rn->bn", x, matrix, preferred_element_type=jnp.float32)


def matrices_as_words(weights: dict[str, Any]) -> dict[str, Any]:
    """View the matrices of a decode step as words, except the embedding, whose rows are looked up."""

    def view(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return x if x.ndim < 2 or path[0].key == "embed" else as_words(x)

    return jax.tree_util.tree_map_with_path(view, weights)
