"""The chunk pairs of a block in the order in which a kernel's grid processes them.

Unmasked and masked pairs form one list, in which pairs without anything to compute come last. The forward pass
processes all keys of a chunk of queries before the next chunk of queries (`by="q"`), so that the state of the rows
stays on the chip. The backward pass processes all queries of a chunk of keys before the next chunk of keys (`by="k"`),
so that the keys' gradients stay on the chip. A **visit** is a run of pairs with the same queries. A list of more than
`MOST_PAIRS` pairs is cut and processed by several calls.
"""

import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from ringformer.ops.work_list import WorkList

MOST_PAIRS = 2**15
"""Most pairs in one table, whose six columns must fit in a core's SMEM of 1 MiB."""


class Columns(NamedTuple):
    """Columns of a pair table, as a kernel reads them from SMEM: a number for each pair."""

    q_of: Any
    k_of: Any
    """The chunk of queries and the chunk of keys."""
    offset_of: Any
    """Query row t sees key column s, chunk-local, where t + offset >= s."""
    used_of: Any
    """The number of used keys; 0 if every query sees every key."""
    visit_of: Any
    """The number of the visit."""
    next_of: Any
    """The first pair of the next visit."""


class PairTable(NamedTuple):
    """Inputs of a kernel for each step of its grid."""

    columns: tuple[Int32[Array, " P"], ...]
    """Scalars to prefetch (`Columns`)."""
    length: Int32[Array, ""] | int
    """Number of pairs to compute."""
    most: tuple[int, int]
    """Upper bounds on the numbers of pairs that the positions leave whole and that they mask. They hold for the sum
    over a block's tables, not for each table. Whole pairs that a document's boundary cuts are masked, too."""
    share: float = 1.0
    """Share of the block's pairs in this table."""


def pair_tables(
    work_list: WorkList,
    by: Literal["q", "k"],
    live: tuple[Any, ...] = (None, None),
    uncut: Bool[Array, " P"] | None = None,
) -> list[PairTable]:
    """Make the tables of a block's work, one per call of a kernel; none if the mask leaves nothing.

    Args:
      live: masks [P] of the unmasked and of the masked pairs that have anything to compute; None: all.
      uncut: mask [P] of the unmasked pairs of which all tokens belong to one segment; None: all.
    """
    lists = []
    wanted = []
    for masked, ((pairs, length), some) in enumerate(zip((work_list.unmasked, work_list.masked), live, strict=True)):
        n = len(pairs.q)
        used = _used_keys(work_list, pairs.k) if masked else np.zeros(n, int)
        if not masked and uncut is not None:
            used = jnp.where(uncut, 0, work_list.k_chunks.size)
        lists.append((pairs.q, pairs.k, pairs.offset, used))
        first = np.ones(n, bool) if isinstance(length, int) else jnp.arange(n) < length
        wanted.append(first if some is None else first & some)
    static = all(isinstance(x, np.ndarray) for x in (*wanted, *lists[0], *lists[1]))
    array: Any = np if static else jnp
    dead = 1 - array.concatenate([array.asarray(x).astype(np.int32) for x in wanted])
    joined = [array.concatenate([array.asarray(x) for x in parts]) for parts in zip(*lists, strict=True)]
    order = (0, 1) if by == "q" else (1, 0)
    keys: list[Any] = [dead, joined[order[0]], joined[order[1]], *joined[2:]]
    if static:
        kept = np.lexsort(keys[2::-1])
        keys = [x[kept] for x in keys]
    elif len(dead):
        keys = list(lax.sort(keys, num_keys=3))
    P = len(dead)
    most = tuple(len(pairs.q) for pairs, _ in (work_list.unmasked, work_list.masked))
    tables = []
    for begin in range(0, P, MOST_PAIRS):
        end = min(begin + MOST_PAIRS, P)
        dead, *columns = (x[begin:end] for x in (keys[0], keys[1 + order[0]], keys[1 + order[1]], *keys[3:]))
        whole, masked = (n * end // P - n * begin // P for n in most)  # as if pairs were spread evenly
        walked, length = _walked(array, dead, columns)
        tables.append(PairTable(walked, length, (whole, masked), (end - begin) / P))
    return tables


def _used_keys(work_list: WorkList, k: Any) -> Any:
    """Count the keys that are not padding in each chunk of `k` [P]; `k` may be traced."""
    used = work_list.k_chunks.used
    if isinstance(k, np.ndarray):
        return used[k]
    return jnp.where(k[:, None] == np.arange(len(used)), used, 0).sum(axis=1)  # a gather takes longer on a TPU


def _walked(array: Any, dead: Any, columns: list[Any]) -> tuple[tuple[Any, ...], Any]:
    """Add the columns about visits to the columns of a table; also return the table's length. Live pairs must come
    before dead ones."""
    q = columns[0]
    n = len(dead)
    is_first = array.concatenate([array.ones(1, bool), q[1:] != q[:-1]]) & (dead == 0)
    starts = array.where(is_first, array.arange(n, dtype=np.int32), np.int32(n))
    later = np.minimum.accumulate(starts[::-1])[::-1] if array is np else lax.cummin(starts, reverse=True)
    following = array.concatenate([later[1:], array.full(1, n, np.int32)])
    length = (1 - dead).sum(dtype=np.int32)
    columns = [jnp.asarray(x, jnp.int32) for x in (*columns, array.cumsum(is_first) - 1, following)]
    return tuple(columns), int(length) if array is np else length


def kernel_name(kind: str, table: PairTable, times: int, visits: int) -> str:
    """Name a kernel for readers of compiled programs. The name states the most pairs without a mask and with a mask in
    its grid (each multiplied by `times`, the batch times the key heads), and how often the data kept on the chip
    changes."""
    whole, masked = (times * n for n in table.most)
    visits = times * math.ceil(visits * table.share)
    return f"flash_{kind}_{whole}_whole_{masked}_masked_{visits}_visits_{times}_heads"


def cost(table: PairTable, times: int, flops: int, pair_bytes: int, visits: int, visit_bytes: int) -> pl.CostEstimate:
    """Estimate the cost of a kernel from FLOPs and bytes per pair and bytes per visit; all pairs count as unmasked."""
    pairs = times * sum(table.most)
    moved = pairs * pair_bytes + int(times * visits * table.share) * visit_bytes
    return pl.CostEstimate(flops=pairs * flops, transcendentals=0, bytes_accessed=moved)
