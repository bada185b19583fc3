"""The call of a kernel over a grid of batch, key heads and the pairs of a table, and the blocks that its steps read."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringformer.ops.kernels.kernel_tools import LANES, SUBLANES, sees
from ringformer.ops.kernels.pair_table import Columns, PairTable

Placed = tuple[jax.Array, pl.BlockSpec]
"""An array, and the block of it that a step of the grid reads or writes."""
HBM = pl.BlockSpec(memory_space=pl.ANY)
"""No block: the kernel copies what it needs."""


class OnChip(NamedTuple):
    """Arrays of a kernel in VMEM."""

    blocks: dict[str, tuple[pl.BlockSpec, Any]]
    """Blocks and dtypes of operands and results by name; Pallas keeps two buffers for each."""
    scratch: dict[str, Any]
    logits: int
    """Largest number of float32 logits that a grid step holds in addition."""

    def place(self, arrays: dict[str, jax.Array]) -> dict[str, Placed]:
        """Return arrays with their blocks."""
        return {name: (x, self.blocks[name][0]) for name, x in arrays.items()}

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


def _padded_bytes(shape: Any, dtype: Any) -> int:
    """Bytes of an array in VMEM, padded to whole registers: the last dimension to lanes, the one before it to sublanes.
    A dimension of None is 1."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, columns = (n or 1 for n in (1, 1, *shape))
    sublanes = SUBLANES * 4 // size
    return math.prod(outer) * (-(-rows // sublanes) * sublanes) * (-(-columns // LANES) * LANES) * size


def call_over_pairs(
    kernel: Callable[..., None],
    table: PairTable,
    operands: dict[str, Placed],
    results: dict[str, Placed],
    on_chip: OnChip,
    q: jax.Array,
    **names: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel for each row of the batch, key head and pair of a table.

    Args:
      kernel: called with the table's `Columns` and references by name: to the operands, to what the results hold
        before (in HBM; `dq_given` is that of the result `dq_out`), to the results, and to the scratch.
      operands: arrays to read.
      results: arrays that are updated in place, with the blocks that the kernel writes.
      q: queries [B, K, ...]; the results vary over the same mesh axes.
      names: further keywords of `pl.pallas_call`: name and cost estimate.
    """
    columns = table.columns
    given = {f"{name.removesuffix('_out')}_given": (x, HBM) for name, (x, _) in results.items()}
    inputs = operands | given
    references = (*inputs, *results, *on_chip.scratch)
    first_given = len(columns) + len(operands)

    def body(*refs):
        of_table = Columns(*refs[: len(columns)])
        kernel(of_table, dict(zip(references, refs[len(columns) :], strict=True)))

    call = pl.pallas_call(
        body,
        out_shape=[_like(x, q) for x, _ in results.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(columns),
            grid=(*q.shape[:2], table.length),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in results.values()],
            scratch_shapes=list(on_chip.scratch.values()),
        ),
        input_output_aliases={first_given + number: number for number in range(len(results))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=on_chip.limit
        ),
        **names,
    )
    return tuple(call(*columns, *(x for x, _ in inputs.values())))


def _like(x: jax.Array, varying: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of an output: shape and dtype of x, varying over the same mesh axes as `varying`."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(varying).manual_axis_type)


class GridStep(NamedTuple):
    """A step of a kernel's grid: a pair of chunks, and its place among the pairs of its visit."""

    columns: Columns
    b: jax.Array
    h: jax.Array
    p: jax.Array
    """Row of the batch, key head and pair."""
    pairs: int | jax.Array
    """Number of pairs."""
    before: jax.Array
    after: jax.Array
    """The pairs before and after this one; the pair itself at the ends."""
    visit: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    """True for the first and for the last pair of a visit."""

    @classmethod
    def now(cls, columns: Columns) -> "GridStep":
        """Return the step that the kernel is in."""
        b, h, p = (pl.program_id(axis) for axis in range(3))
        pairs = pl.num_programs(2)
        visit = columns.visit_of[p]
        before = jnp.maximum(p - 1, 0)
        after = jnp.minimum(p + 1, pairs - 1)
        is_first = (p == 0) | (columns.visit_of[before] != visit)
        is_last = (p == pairs - 1) | (columns.visit_of[after] != visit)
        return cls(columns, b, h, p, pairs, before, after, visit, is_first, is_last)

    @property
    def q_chunk(self) -> jax.Array:
        return self.columns.q_of[self.p]

    @property
    def k_chunk(self) -> jax.Array:
        return self.columns.k_of[self.p]

    @property
    def is_last_of_all(self) -> jax.Array:
        return self.p == self.pairs - 1

    @property
    def is_masked(self) -> jax.Array:
        """Return True if some queries of the pair do not see some keys."""
        return self.columns.used_of[self.p] > 0

    def visible(self, keys: slice, Tq: int, window: int | None) -> jax.Array:
        """Mask [keys, Tq] of a masked pair: the keys that its queries see, whatever their segments."""
        return sees(self.columns.offset_of[self.p], self.columns.used_of[self.p], keys, Tq, window)


def queries_block(G: int, Tq: int, d: int) -> pl.BlockSpec:
    """The pair's queries, of [B, K, G, T, d]: a block [G, Tq, d]."""
    return pl.BlockSpec((None, None, G, Tq, d), lambda b, h, p, q_of, *_: (b, h, 0, q_of[p], 0))


def query_rows_block(G: int, Tq: int) -> pl.BlockSpec:
    """Two values of each of the pair's queries, of [2, B, K, G, T]: a block [2, G, Tq]."""
    return pl.BlockSpec((2, None, None, G, Tq), lambda b, h, p, q_of, *_: (0, b, h, 0, q_of[p]))


def query_row_block(Tq: int) -> pl.BlockSpec:
    """Values of the pair's queries, of [B, 1, T]: a block [1, Tq]."""
    return pl.BlockSpec((None, 1, Tq), lambda b, h, p, q_of, *_: (b, 0, q_of[p]))


def keys_block(Tk: int, d: int, readers: int) -> pl.BlockSpec:
    """The pair's keys and values, of [2, B, K, S, d], each head read by so many groups of queries: a block
    [2, Tk, d]."""

    def place(b, h, p, q_of, k_of, *_):
        return 0, b, lax.div(h, readers), k_of[p], 0

    return pl.BlockSpec((2, None, None, Tk, d), place)


def key_sums_block(Tk: int, d: int) -> pl.BlockSpec:
    """Gradients of the pair's keys and values, of [2, B, K, S, d] with a head for each group of queries: a block
    [2, Tk, d]."""
    return pl.BlockSpec((2, None, None, Tk, d), lambda b, h, p, q_of, k_of, *_: (0, b, h, k_of[p], 0))


def key_row_block(Tk: int) -> pl.BlockSpec:
    """Values of the pair's keys, of [B, 1, S]: a block [1, Tk]."""
    return pl.BlockSpec((None, 1, Tk), lambda b, h, p, q_of, k_of, *_: (b, 0, k_of[p]))


def key_head_row_block(Tk: int) -> pl.BlockSpec:
    """Values of the pair's keys by head, of [B, K, 1, S]: a block [1, Tk]."""
    return pl.BlockSpec((None, None, 1, Tk), lambda b, h, p, q_of, k_of, *_: (b, h, 0, k_of[p]))
