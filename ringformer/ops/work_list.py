"""The work list of one block: which pairs of a query chunk and a key chunk have anything to compute.

A shard is cut into chunks that never straddle a part (see `layouts`). What a causal mask leaves of a block is
known before the program runs, as a table of chunk pairs, so that the loop over it needs no branch and every trip
does useful work.
"""

from typing import NamedTuple

import numpy as np

from ringformer.ops.layouts import FULL, PARTS, VISIBLE


class Chunks(NamedTuple):
    """How one axis of a shard is cut. The last chunk of a part overlaps its neighbour rather than being ragged."""

    size: int
    start: np.ndarray  # int32 [n]: the first index of each chunk
    fresh: np.ndarray  # int32 [n]: the chunk-local index before which its rows were in the previous chunk
    part: np.ndarray  # int32 [n]: the part that each chunk belongs to
    origin: np.ndarray  # int32 [n]: the first index of that part


class Pairs(NamedTuple):
    """Chunk pairs; local query row t sees local key column s where `t + offset >= s`. All int32 [P]."""

    q: np.ndarray
    k: np.ndarray
    offset: np.ndarray


def default_chunk(length: int) -> int:
    """16 chunks a shard, of at least 128 and at most 1024 tokens.

    Causal work exceeds the mask's need by 1/n with n chunks a shard, so that 16 keep it within 7%; the logits of
    a chunk pair take 4 B H chunk^2 bytes.
    """
    return min(max(-(-length // 16), 128), 1024)


def cut(length: int, parts: int, chunk: int | None) -> Chunks:
    """Cut `parts` equal parts of an axis of `length` into chunks of at most `chunk`."""
    part_length = length // parts
    size = min(default_chunk(length) if chunk is None else chunk, part_length)
    per_part = -(-part_length // size)
    nominal = np.arange(per_part) * size
    start = np.minimum(nominal, part_length - size)
    part = np.repeat(np.arange(parts), per_part)
    origin = part * part_length
    return Chunks(
        size,
        start=(np.tile(start, parts) + origin).astype(np.int32),
        fresh=np.tile(nominal - start, parts).astype(np.int32),
        part=part.astype(np.int32),
        origin=origin.astype(np.int32),
    )


def visible_pairs(layout: str, source: str, causal: bool, q: Chunks, k: Chunks) -> tuple[Pairs, Pairs]:
    """`(whole, masked)`: the pairs that every query sees entirely, and those that need the offset mask."""
    if causal:
        parts = VISIBLE[layout][source]
    else:
        parts = [(a, b, FULL) for a in range(PARTS[layout]) for b in range(PARTS[layout])]
    rows = [np.zeros((4, 0), np.int64)]
    for q_part, k_part, part_offset in parts:
        i, j = np.flatnonzero(q.part == q_part)[:, None], np.flatnonzero(k.part == k_part)
        offset = part_offset + (q.start - q.origin).astype(np.int64)[i] - (k.start - k.origin)[j]
        offset = np.minimum(offset, FULL)
        sees_any = q.size - 1 + offset >= k.fresh[j]
        sees_all = (offset >= k.size - 1) & (q.fresh[i] == 0) & (k.fresh[j] == 0)
        row, column = np.nonzero(sees_any)
        rows.append(np.stack([i[row, 0], j[column], offset[row, column], sees_all[row, column]]))
    *pairs, sees_all = np.concatenate(rows, axis=1).astype(np.int32)
    return tuple(Pairs(*(x[sees_all == wanted] for x in pairs)) for wanted in (1, 0))
