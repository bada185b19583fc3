"""The work list of one block: the pairs of a query chunk and a key chunk that have anything to compute.

A shard is cut into chunks that never straddle a part (see `layouts`). The pairs of a block that a causal mask leaves
are tabulated before the program runs. So the loop over them needs no branch, and every iteration does useful work. On a
ring, a traced condition selects between the tables for earlier and later ranks.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from ringformer.ops.layouts import FULL, PARTS, VISIBLE, Layout, Source


class AxisChunks(NamedTuple):
    """The chunks of one axis of a shard. The last chunk of a part overlaps its neighbour instead of being shorter."""

    size: int
    start: Int32[np.ndarray, " n"]  # the first index of each chunk
    fresh: Int32[np.ndarray, " n"]  # the chunk-local index of the first row that is not in the previous chunk
    used: Int32[np.ndarray, " n"]  # the chunk-local index from which rows are padding
    part: Int32[np.ndarray, " n"]  # the part of each chunk
    origin: Int32[np.ndarray, " n"]  # the first index of that part
    first: int = 0  # the token of each part at which the axis begins

    @property
    def length(self) -> int:
        """Tokens of the axis."""
        return int(self.start[-1]) + self.size


class ChunkPairs(NamedTuple):
    """Pairs of a query chunk and a key chunk; query row t sees key column s, chunk-local, where `t + offset >= s` and,
    within a window of W keys, `s > t + offset - W`."""

    q: Int32[np.ndarray | Array, " P"]
    k: Int32[np.ndarray | Array, " P"]
    offset: Int32[np.ndarray | Array, " P"]


class PairList(NamedTuple):
    """Chunk pairs, of which only the first `length` (a number or a traced int32) count. The arrays may be traced
    too."""

    pairs: ChunkPairs
    length: int | Int32[Array, ""]


class WorkList(NamedTuple):
    """One block's chunk pairs: those that are fully visible, and those that need the offset mask."""

    q_chunks: AxisChunks
    k_chunks: AxisChunks
    unmasked: PairList
    masked: PairList
    every_pair: bool = False
    """True: compute all pairs, even those without a common segment, so that the trip count is static."""
    window: int | None = None
    """Keys that a query sees at most, the last ones; None: no limit. Pairs without a mask lie within it."""


def default_chunk(length: int) -> int:
    """Tokens per chunk of a shard of `length`: a 16th, but at least 128 and at most 1024.

    With n chunks per shard, causal work exceeds the minimum by 1/n, so 16 chunks keep the excess within 7%. The logits
    of a chunk pair take 4 B H chunk^2 bytes.
    """
    return min(max(-(-length // 16), 128), 1024)


def cut_axis(length: int, parts: int, chunk: int | None, filler: int = 0, first: int = 0) -> AxisChunks:
    """Cut each of the `parts` equal parts of an axis of `length` into chunks of at most `chunk` (None: the default).

    The last `filler` tokens of each part, fewer than a chunk, are padding. The axis may be a run of a shard's tokens,
    from the token `first` of each part.
    """
    part_length = length // parts
    size = min(default_chunk(length) if chunk is None else chunk, part_length)
    per_part = -(-part_length // size)
    nominal = np.arange(per_part) * size
    start = np.minimum(nominal, part_length - size)
    part = np.repeat(np.arange(parts), per_part)
    origin = part * part_length
    return AxisChunks(
        size,
        start=(np.tile(start, parts) + origin).astype(np.int32),
        fresh=np.tile(nominal - start, parts).astype(np.int32),
        used=np.tile(np.minimum(part_length - filler - start, size), parts).astype(np.int32),
        part=part.astype(np.int32),
        origin=origin.astype(np.int32),
        first=first,
    )


def visible_pairs(
    layout: Layout, source: Source, causal: bool, q: AxisChunks, k: AxisChunks
) -> tuple[ChunkPairs, ChunkPairs]:
    """Return `(unmasked, masked)`: the pairs that are fully visible, and those that need the offset mask or have padded
    keys."""
    visible = VISIBLE[layout][source]
    if not causal:
        visible = tuple((a, b, FULL) for a in range(PARTS[layout]) for b in range(PARTS[layout]))
    return _pairs(visible, q, k)


def _pairs(
    visible: Iterable[tuple[int, int, int]], q: AxisChunks, k: AxisChunks, window: int | None = None
) -> tuple[ChunkPairs, ChunkPairs]:
    """Cut visible (query part, key part, offset) into `(unmasked, masked)` pairs of chunks."""
    rows = [np.zeros((4, 0), np.int64)]
    for q_part, k_part, part_offset in visible:
        i = np.flatnonzero(q.part == q_part)[:, None]
        j = np.flatnonzero(k.part == k_part)
        offset = part_offset + (q.start - q.origin).astype(np.int64)[i] - (k.first + k.start - k.origin)[j]
        offset = np.minimum(offset, FULL)
        sees_any = q.size - 1 + offset >= k.fresh[j]
        sees_all = (offset >= k.size - 1) & (q.fresh[i] == 0) & (k.fresh[j] == 0) & (k.used[j] == k.size)
        if window is not None:
            sees_any &= k.used[j] - 1 > q.fresh[i] + offset - window
            sees_all &= q.size - 1 + offset < window
        row, column = np.nonzero(sees_any)
        rows.append(np.stack([i[row, 0], j[column], offset[row, column], sees_all[row, column]]))
    *pairs, sees_all = np.concatenate(rows, axis=1).astype(np.int32)
    return ChunkPairs(*(x[sees_all == 1] for x in pairs)), ChunkPairs(*(x[sees_all == 0] for x in pairs))


def make_work_list(
    layout: Layout, causal: bool, q: AxisChunks, k: AxisChunks, earlier: Bool[Array, ""] | None
) -> WorkList:
    """Make the chunk pairs of a visiting block. `earlier`: True if its keys come from an earlier rank; None: the rank's
    own block."""
    if earlier is None or not causal:
        unmasked, masked = (PairList(x, len(x.q)) for x in visible_pairs(layout, "own", causal, q, k))
    else:
        before = visible_pairs(layout, "earlier", True, q, k)
        after = visible_pairs(layout, "later", True, q, k)
        unmasked, masked = (_select(earlier, a, b) for a, b in zip(before, after, strict=True))
    return WorkList(q, k, unmasked, masked)


def make_gathered_work_list(
    layout: Layout, causal: bool, q: AxisChunks, k: AxisChunks, rank: Int32[Array, ""], ranks: int
) -> WorkList:
    """Make the chunk pairs of a rank's queries and the keys of all other ranks, gathered in the order of the ranks; `k`
    are the chunks of one shard."""
    n = len(k.start)
    S = k.length
    shards, place = np.divmod(np.arange(ranks * n), n)
    gathered = k._replace(
        start=k.start[place] + (shards * S).astype(np.int32),
        fresh=k.fresh[place],
        used=k.used[place],
        part=k.part[place] + (shards * (k.part[-1] + 1)).astype(np.int32),
        origin=k.origin[place] + (shards * S).astype(np.int32),
    )
    t = np.arange(1, ranks, dtype=np.int32)[:, None]
    tables = visible_pairs(layout, "earlier", causal, q, k), visible_pairs(layout, "later", causal, q, k)

    def of_others(before: ChunkPairs, after: ChunkPairs) -> PairList:
        pairs, length = _select(rank >= t, before, after)
        columns = [x.ravel() for x in (pairs.q, pairs.k + (rank - t) % ranks * n, pairs.offset)]
        if isinstance(length, int):
            return PairList(ChunkPairs(*columns), length * (ranks - 1))
        dead = (jnp.arange(pairs.q.shape[1]) >= length).ravel()  # the pairs that count come first
        _, *first = lax.sort([dead, *map(jnp.asarray, columns)], num_keys=1, is_stable=True)
        return PairList(ChunkPairs(*first), length.sum())

    unmasked, masked = (of_others(before, after) for before, after in zip(*tables, strict=True))
    return WorkList(q, gathered, unmasked, masked)


def make_window_work_list(
    q: AxisChunks, k: AxisChunks, distance: int | None, window: int | None, has_keys: list[Bool[Array, ""] | bool]
) -> WorkList:
    """Make the chunk pairs of each part of a shard and the keys of one earlier part of the sequence.

    Args:
      distance: tokens from the beginning of the earlier part to that of the queries' part; None: every query sees every
        key. window: the most keys that a query sees; None: the distance leaves them all visible.
      has_keys: for each part, whether there is such an earlier part; a part has one if the part before it has one.
    """
    lists: list[list[ChunkPairs]] = [[], []]
    counts: list[list[Any]] = [[], []]
    for part in reversed(range(len(has_keys))):  # the pairs that count come first
        pairs = _pairs([(part, part, FULL if distance is None else distance)], q, k, window)
        for kind, of_part in enumerate(pairs):
            lists[kind].append(of_part)
            counts[kind].append(len(of_part.q) if has_keys[part] is True else has_keys[part] * len(of_part.q))
    unmasked, masked = (
        PairList(ChunkPairs(*map(np.concatenate, zip(*of_kind, strict=True))), sum(count))
        for of_kind, count in zip(lists, counts, strict=True)
    )
    return WorkList(q, k, unmasked, masked, window=window)


def make_first_keys_work_list(q: AxisChunks, k: AxisChunks, starts: list[Int32[Array, ""]], window: int) -> WorkList:
    """Make the chunk pairs of a shard and the first keys of the sequence, as far as a window does not reach them.

    Args:
      starts: the position in the sequence of each part of the shard.
    """
    i = np.repeat(np.arange(len(q.start)), len(k.start))
    j = np.tile(np.arange(len(k.start)), len(q.start))
    begin = sum(jnp.where(q.part[i] == part, start, 0) for part, start in enumerate(starts))
    offset = begin + (q.start - q.origin)[i] - k.start[j] - window
    nothing = ChunkPairs(*np.zeros((3, 0), np.int32))
    pairs = ChunkPairs(i.astype(np.int32), j.astype(np.int32), offset.astype(jnp.int32))
    return WorkList(q, k, PairList(nothing, 0), PairList(pairs, len(i)))


def diagonal_work_list(length: int, pieces: int) -> WorkList:
    """Make the chunk pairs of a rank's own shard, cut into `pieces` equal pieces, under a causal mask: only the pairs
    within a piece."""
    chunks = cut_axis(length, pieces, default_chunk(length))
    unmasked, masked = (PairList(x, len(x.q)) for x in _pairs([(i, i, 0) for i in range(pieces)], chunks, chunks))
    return WorkList(chunks, chunks, unmasked, masked, every_pair=pieces > 1)


def _select(condition: jax.Array, a: ChunkPairs, b: ChunkPairs) -> PairList:
    """Select `a` or `b`. If both have the same length, as in a balanced layout, the length stays static and no branch
    is needed."""
    length: int | jax.Array = len(a.q)
    if len(a.q) != len(b.q):
        length = jnp.where(condition, len(a.q), len(b.q))
        longest = max(len(a.q), len(b.q))
        a, b = (ChunkPairs(*(np.pad(column, (0, longest - len(column))) for column in pairs)) for pairs in (a, b))
    return PairList(ChunkPairs(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))), length)
