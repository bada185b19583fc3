"""Arrays in the host's pinned memory, which devices read and write a few rows at a time (inside `shard_map`).

A row is a layer of stacked weights, or a row of a matrix. Compilers turn these reads and writes into copies that go on
while the device computes.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.ops.host_stand_in import is_in_host
from ringformer.ops.varying_axes import vary_like, varying_axes

HOST_MEMORY = "pinned_host"
"""JAX's name of the host's memory that a device reads and writes by itself."""

ROW_BYTES = 64 * 2**20
"""Bytes of an array that travel at once. A layer of a large model takes more, and then travels alone."""

MOST_PIECES = 64
"""Pieces above which an array travels whole, if that is allowed."""

SUBLANES, LANES = 8, 128
"""Rows and columns of a tile of a TPU's memory: a matrix is cut between tiles."""


def rows_at_once(arrays: list[Any], share: float = 1.0, may_be_whole: bool = True) -> int:
    """Return how many rows of all these arrays, which have equally many, travel at once: as many as `ROW_BYTES` allow
    of a share of the arrays, and at least one.

    Unless they `may_be_whole`, they are at most half of the rows. So they are for arrays without whole lanes, unless
    only many small pieces are equal parts: a TPU's compiler may want such an array in another layout on the device, and
    cannot copy it whole.
    """
    size = len(arrays[0])
    of_row = share * sum(x.nbytes for x in arrays) / size
    matrices = any(x.ndim == 2 for x in arrays)
    unit = SUBLANES if matrices and size % SUBLANES == 0 else 1
    whole_lanes = all(x.shape[-1] % LANES == 0 for x in arrays)
    most = size if may_be_whole and whole_lanes else size // 2
    fitting = unit
    for rows in range(unit, most + 1, unit):
        if size % rows == 0 and rows * of_row <= ROW_BYTES:
            fitting = rows
    many = size // fitting > MOST_PIECES
    if many and size * of_row <= ROW_BYTES:
        return size
    return fitting


def read_rows(arrays: Any, start: Any, rows: int) -> Any:
    """Return rows from `start` on of a tree of arrays, on the device."""

    def read(x):
        of_array = lax.dynamic_slice_in_dim(x, start, rows)
        # XLA refuses an argument that is told to come to the device from the device.
        return jax.device_put(of_array, jax.memory.Space.Device) if is_in_host(x) else of_array

    return jax.tree.map(read, arrays)


def write_rows(arrays: Any, new: Any, start: Any) -> Any:
    """Return a tree of arrays with new rows from `start` on, each array in its own memory."""

    def write(x, y):
        if is_in_host(x):
            y = jax.device_put(y, jax.memory.Space.Host)
        return lax.dynamic_update_slice_in_dim(x, y, start, 0)

    return jax.tree.map(write, arrays, new)


def copy_to_device(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return a copy of an array in host memory on the device, in a dtype."""
    rows = rows_at_once([x], may_be_whole=False)  # beside the copy
    turns = len(x) // rows

    def turn(i, carry):
        copy, here = carry
        arriving = read_rows(x, (i + 1) * rows, rows)
        return write_rows(copy, here.astype(dtype), i * rows), arriving

    copy = vary_like(jnp.zeros(x.shape, dtype), x)
    copy, here = lax.fori_loop(0, turns - 1, turn, (copy, read_rows(x, 0, rows)))
    return write_rows(copy, here.astype(dtype), (turns - 1) * rows)


def fold_rows(function: Callable[[jax.Array, jax.Array], jax.Array], total: jax.Array, x: jax.Array) -> jax.Array:
    """Return `total = function(total, rows)` after all rows of an array in host memory, which come to the device in
    order, while the rows before them are used. The total varies as x does."""
    rows = rows_at_once([x])
    turns = len(x) // rows

    def turn(i, carry):
        total, here = carry
        arriving = read_rows(x, (i + 1) * rows, rows)
        return function(total, here), arriving

    begin = vary_like(total, x), read_rows(x, 0, rows)
    total, here = lax.fori_loop(0, turns - 1, turn, begin)
    return function(total, here)


@lru_cache
def finite_in_host(sharding: NamedSharding) -> jax.stages.Wrapped:
    """Return the jitted `finite(x) -> bool scalar` for a global array in host memory."""

    def finite(x):
        of_shard = fold_rows(lambda finite, rows: finite & jnp.isfinite(rows).all(), jnp.bool_(True), x)
        axes = tuple(sorted(varying_axes(x)))
        if not axes:  # one shard
            return of_shard
        return lax.pmin(of_shard.astype(jnp.int32), axes) == 1

    return jax.jit(jax.shard_map(finite, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=P()))


def device_bytes(tree: Any) -> int:
    """Bytes of a device's shards of a tree of arrays, without the padding of tiles."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
