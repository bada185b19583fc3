"""Chunk pairs whose queries and keys may share a segment: those of packed documents that have something to compute."""

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Int, Int32

from ringformer.ops.work_list import AxisChunks, ChunkPairs, WorkList

Ids = Int[Array, "B _"] | None
"""Segment of each token; None: the sequence is one segment."""


def live_pairs(q_ids: Ids, k_ids: Ids, work_list: WorkList) -> tuple[Bool[Array, " P"] | None, ...]:
    """Return two masks, over the unmasked and over the masked pairs: True where a pair shares a segment. None without
    segment ids."""
    return tuple(
        pairs_of_a_segment(q_ids, k_ids, pairs, work_list) for pairs, _ in (work_list.unmasked, work_list.masked)
    )


def uncut_pairs(q_ids: Ids, k_ids: Ids, work_list: WorkList) -> Bool[Array, " P"] | None:
    """Mask the unmasked pairs in which all tokens belong to one segment, in every row of the batch: these pairs need no
    comparison of ids. None without segment ids."""
    if q_ids is None or k_ids is None:
        return None
    (q_min, q_max), (k_min, k_max) = _pair_ranges(q_ids, k_ids, work_list.unmasked[0], work_list)
    return ((q_min == k_max) & (k_min == q_max)).all(axis=0)


def pairs_of_a_segment(q_ids: Ids, k_ids: Ids, pairs: ChunkPairs, work_list: WorkList) -> Bool[Array, " P"] | None:
    """Mask the pairs in which a query may share a segment with a key; None without segment ids, or if every pair of the
    list is computed.

    It compares ranges of ids. This is exact for packed documents, whose ids ascend without gaps.
    """
    if q_ids is None or k_ids is None or work_list.every_pair:
        return None
    (q_min, q_max), (k_min, k_max) = _pair_ranges(q_ids, k_ids, pairs, work_list)
    return ((q_min <= k_max) & (k_min <= q_max)).any(axis=0)


def _pair_ranges(q_ids: Int[Array, "B T"], k_ids: Int[Array, "B S"], pairs: ChunkPairs, work_list: WorkList):
    """Find the smallest and the largest id of each pair's queries, and of its keys."""
    return _id_ranges(q_ids, work_list.q_chunks, pairs.q), _id_ranges(k_ids, work_list.k_chunks, pairs.k)


def _id_ranges(
    ids: Int[Array, "B T"], chunks: AxisChunks, wanted: Int32[np.ndarray | Array, " P"]
) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """Find the smallest and the largest id of each wanted chunk without a gather, as in `_for_each_pair`."""
    size = chunks.size
    parts = rearrange(ids, "b (p t) -> b p t", p=int(chunks.part[-1]) + 1)
    n_aligned = len(chunks.part) // parts.shape[1] - 1  # the last chunk of a part may overlap its neighbour
    aligned = rearrange(parts[:, :, : n_aligned * size], "b p (n t) -> b p n t", t=size)
    by_chunk = jnp.concatenate([aligned, parts[:, :, None, -size:]], axis=2)
    is_wanted = wanted[:, None] == jnp.arange(len(chunks.part))

    def of_wanted(extremes):
        return jnp.where(is_wanted, rearrange(extremes, "b p n -> b 1 (p n)"), 0).sum(axis=-1)

    return of_wanted(by_chunk.min(axis=-1)), of_wanted(by_chunk.max(axis=-1))
