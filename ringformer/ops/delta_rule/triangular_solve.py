"""Solutions of unit lower triangular systems."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from ringformer.ops.delta_rule.products import product

_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def unit_lower_solve(
    a: Float32[Array, "*n C C"], inverse: Float32[Array, "*n C C"], b: Float32[Array, "*n C d"], dtype: DTypeLike
) -> Float32[Array, "*n C d"]:
    """Return y = (I + a)^-1 b for strictly lower triangular a, with products of the inverse in a dtype.

    The gradient by a is -(I + a)^-T dy y^T, so `inverse`, which is `unit_lower_inverse(a)`, has none: by the inverse it
    would take two more products of square matrices.
    """
    return product("...ij,...jd->...id", inverse, b, dtype)


def _solve(a, inverse, b, dtype: DTypeLike):
    y = unit_lower_solve(a, inverse, b, dtype)
    return y, (inverse, y)


def _gradients(dtype: DTypeLike, residuals, dy):
    inverse, y = residuals
    db = product("...ij,...id->...jd", inverse, dy, dtype)
    da = -product("...id,...jd->...ij", db, y, dtype)
    return jnp.tril(da, -1), None, db


unit_lower_solve.defvjp(_solve, _gradients)


def unit_lower_inverse(a: Float32[Array, "*n C C"]) -> Float32[Array, "*n C C"]:
    """Return (I + a)^-1 for strictly lower triangular a; C is a power of 2.

    By blocks: if the inverses X of both diagonal blocks are known, the block below them is -X_22 a_21 X_11. Blocks
    double from 1 to C. This is as exact as forward substitution; a Neumann product (I - a)(I + a^2)... overflows where
    keys are nearly equal.
    """
    C = a.shape[-1]
    assert C & (C - 1) == 0, "chunks are powers of 2"
    x = jnp.broadcast_to(jnp.eye(C, dtype=a.dtype), a.shape)
    size = 1
    while size < C:
        x = _doubled(a, x, size)
        size *= 2
    return x


def _doubled(a, x, size: int):
    """Return the inverses of diagonal blocks of 2 `size` rows; x has those of blocks of `size`."""
    count = a.shape[-1] // (2 * size)
    corners = []
    for matrix in (x, a, x):
        corners.append(_diagonal_blocks(matrix, count))
    upper = corners[0][..., :size, :size]
    lower = corners[2][..., size:, size:]
    below = -_product(lower, _product(corners[1][..., size:, :size], upper))
    place = jnp.zeros((*below.shape[:-2], 2 * size, 2 * size), x.dtype).at[..., size:, :size].set(below)
    return x + _on_diagonal(place)


def _diagonal_blocks(matrix, count: int):
    """Return the square blocks on the diagonal, [*n, count, size, size]."""
    size = matrix.shape[-1] // count
    blocks = matrix.reshape(*matrix.shape[:-2], count, size, count, size)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)


def _on_diagonal(blocks):
    """Invert `_diagonal_blocks`, with zeros elsewhere."""
    count, size = blocks.shape[-3:-1]
    whole = blocks[..., :, :, None, :] * jnp.eye(count, dtype=blocks.dtype)[:, None, :, None]
    return whole.reshape(*blocks.shape[:-3], count * size, count * size)
