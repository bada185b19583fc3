"""Adafactor (Shazeer & Stern 2018): the second moment of a matrix as the means of its rows and of its columns.

A matrix of n rows and m columns has n + m statistics instead of n m second moments, and there is no first moment. Their
product, divided by the mean of all, estimates the second moment (the paper's algorithm 4, with the decay of section
7.2 and the clipping of section 6). For a vector, a matrix of one column, the estimate is its second moment itself.

Each layer of stacked weights has its own matrix. A device has a shard of it: means are summed over the mesh axes that
shard what they are means over, and divided by the number of elements without padding.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float32

from ringformer.parallel.parameters import by_name, map_by_name
from ringformer.parallel.weight_sharding import WeightSharding
from ringformer.train.matrix_layout import MatrixLayout, matrix_layout

DECAY_EXPONENT = 0.8
"""At step t, the statistics keep 1 - t^-0.8 of themselves."""

LARGEST_UPDATE = 1.0
"""Root mean square of the elements of a matrix above which its update is scaled down."""

EPSILON = 1e-30
"""Added to each squared gradient."""


class AdafactorState(NamedTuple):
    """Number of updates, and the statistics: decayed means of squared gradients, float32. A statistic has as many
    dimensions as its parameter, of which those that it is a mean over have size 1."""

    count: Any
    rows: Any
    """Mean of each row, i.e. over the columns."""
    columns: Any
    """Mean of each column, i.e. over the rows."""


@dataclass(frozen=True)
class ShardedMatrix:
    """The matrix of a parameter, or one matrix for each stacked layer, of which a device has a shard."""

    layout: MatrixLayout
    sharding: WeightSharding

    @property
    def layers(self) -> int:
        """Number of stacked layers."""
        dims = len(self.layout.rows + self.layout.columns)
        return math.prod(self.sharding.shape[:-dims])

    def mean(self, shard: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        """Return the mean over dimensions, which stay with size 1. Padding, which is zero, does not count (inside
        `shard_map` if the matrix is sharded)."""
        total = jnp.sum(shard, axis=dims, keepdims=True)
        axes: list[str] = []
        for dim in dims:
            axes += self.sharding.axes(dim)
        if axes:
            total = lax.psum(total, tuple(axes))
        return total / math.prod(self.sharding.shape[dim] for dim in dims)

    def row_means(self, shard: jax.Array) -> jax.Array:
        """Return the mean of each row."""
        return self.mean(shard, self.layout.columns)

    def column_means(self, shard: jax.Array) -> jax.Array:
        """Return the mean of each column."""
        return self.mean(shard, self.layout.rows)

    def mean_of_all(self, shard: jax.Array) -> jax.Array:
        """Return the mean of each matrix."""
        return self.mean(shard, self.layout.rows + self.layout.columns)


def sharded_matrices(letters: dict[str, Any], weights: dict[str, Any]) -> dict[str, ShardedMatrix]:
    """Return the matrix of each parameter by its name, from trees of their shape letters and `WeightSharding`s."""
    shardings = by_name(weights)
    matrices = {}
    for name, of_parameter in by_name(letters).items():
        matrices[name] = ShardedMatrix(matrix_layout(of_parameter), shardings[name])
    return matrices


def scale_by_adafactor(matrices: dict[str, ShardedMatrix]) -> optax.GradientTransformation:
    """Return Adafactor without a first moment, whose rate is absolute: neither relative to the step's number, nor to
    the size of a parameter.

    Args:
      matrices: those of the parameters by name. `init` also takes global arrays, with padding.
    """

    def init(params):
        def of_rows(name, p):
            return _zeros(p.shape, matrices[name].layout.columns)

        def of_columns(name, p):
            return _zeros(p.shape, matrices[name].layout.rows)

        return AdafactorState(jnp.zeros((), jnp.int32), map_by_name(of_rows, params), map_by_name(of_columns, params))

    def update(grads, state, params=None):
        count = optax.safe_increment(state.count)
        share = count.astype(jnp.float32) ** -DECAY_EXPONENT

        def of_rows(name, before, grad):
            now = matrices[name].row_means(jnp.square(grad))
            return before + share * (now - before)

        def of_columns(name, before, grad):
            now = matrices[name].column_means(jnp.square(grad))
            return before + share * (now - before)

        def scaled(name, grad, rows, columns):
            return _scaled(matrices[name], grad, rows, columns)

        rows = map_by_name(of_rows, state.rows, grads)
        columns = map_by_name(of_columns, state.columns, grads)
        updates = map_by_name(scaled, grads, rows, columns)
        return updates, AdafactorState(count, rows, columns)

    return optax.GradientTransformation(init, update)


def _zeros(shape: tuple[int, ...], mean_over: tuple[int, ...]) -> Float32[Array, "..."]:
    """Return the statistic of an array of a shape that is a mean over dimensions, before the first update."""
    sizes = list(shape)
    for dim in mean_over:
        sizes[dim] = 1
    return jnp.zeros(sizes, jnp.float32)


def _scaled(matrix: ShardedMatrix, grad: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Return the gradient divided by the root of the estimated second moment, and scaled down if it is large.

    The statistics are of squares alone, so that padding stays zero. Means of squares plus epsilon are these means plus
    epsilon.
    """
    mean = matrix.column_means(rows)
    of_rows = lax.rsqrt(rows + EPSILON) * jnp.sqrt(mean + EPSILON)
    of_columns = lax.rsqrt(columns + EPSILON)
    update = grad * of_rows * of_columns
    size = jnp.sqrt(matrix.mean_of_all(jnp.square(update)))
    return update / jnp.maximum(1.0, size / LARGEST_UPDATE)
