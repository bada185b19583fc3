"""Work of packed documents on a ring, counted chunk pair by chunk pair.

At every hop, all ranks wait for the one with the most chunk pairs to compute. A pair is computed if a query of it may
share a document with a key of it. So two factors separate the work from its ideal, which is the visible pairs of
tokens, divided by the ranks:

    balance   the slowest rank of a hop, over the mean
    excess    pairs of tokens in the computed chunk pairs, over visible pairs

Their product is how many times longer attention takes than its ideal, apart from the kernel's own efficiency, which is
smaller for small chunks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int64

from ringformer.ops.layouts import PARTS, Layout, Source, permutation
from ringformer.ops.work_list import AxisChunks, cut_axis, visible_pairs

KERNEL_SHARES = {2048: 0.96, 1024: 0.91, 512: 0.72, 256: 0.35}
"""Share of ideal cycles that the TPU kernels reach on v5e with segment ids, by tokens of a chunk: two forwards and a
backward, the mean of steps with and without a mask (`tests/estimate/kernels/test_slot_use.py` counts them)."""


def kernel_share(chunk: int) -> float:
    """Return the share of a chunk of any size: between two of `KERNEL_SHARES`, or in proportion to the smallest."""
    sizes, shares = zip(*sorted(KERNEL_SHARES.items()), strict=True)
    if chunk < sizes[0]:
        return shares[0] * chunk / sizes[0]
    return float(np.interp(chunk, sizes, shares))


class RingWork(NamedTuple):
    """Pairs of tokens of some sequences, each on a ring or on equal parts of one."""

    by_hop: Float64[np.ndarray, "sequences hops"]
    """Pairs of the slowest rank before each hop, and after the last."""
    computed: float
    """Pairs that all ranks compute; the mean of the sequences."""
    visible: float
    """Pairs that the masks leave; the mean of the sequences."""
    ranks: int

    @property
    def slowest(self) -> float:
        """Pairs of the slowest rank, summed over hops; the mean of the sequences."""
        return float(self.by_hop.sum(axis=1).mean())

    @property
    def idle_hops(self) -> int:
        """Hops whose keys no rank needs, in any sequence."""
        return int((self.by_hop[:, 1:].max(axis=0) == 0).sum())

    @property
    def balance(self) -> float:
        """Work of the slowest rank over the mean."""
        return self.slowest * self.ranks / self.computed

    @property
    def excess(self) -> float:
        """Computed pairs over visible ones."""
        return self.computed / self.visible

    @property
    def product(self) -> float:
        """Duration over its ideal."""
        return self.slowest * self.ranks / self.visible

    def times(self, factor: float) -> "RingWork":
        """Return so many times the pairs."""
        return RingWork(factor * self.by_hop, factor * self.computed, factor * self.visible, self.ranks)


Chunk = int | tuple[int | None, int | None] | None
"""Tokens of a chunk of queries and of keys, or of each; None: the op's default."""


def ring_work(
    segment_ids: Int[np.ndarray, "*rows T"],
    layout: Layout,
    ranks: int,
    chunk: Chunk,
    order: Int64[np.ndarray, " T"] | None = None,
    gathered: bool = False,
) -> RingWork:
    """Count the work of one sequence on a ring, or of several that a device computes at once: it then computes every
    pair of chunks that one of them needs.

    Args:
      segment_ids: ids of the documents in natural order, ascending.
      order: the token at each place of the concatenated shards; None: that of the layout.
      gathered: the keys of the other ranks arrive together, so that ranks do not wait for each other at every hop.
    """
    rows = np.atleast_2d(segment_ids)
    T = segment_ids.shape[-1]
    tokens = permutation(layout, T, ranks) if order is None else order
    ids = rows[:, tokens].reshape(len(rows), ranks, T // ranks)
    q_chunk, k_chunk = chunk if isinstance(chunk, tuple) else (chunk, chunk)
    q_cut = cut_axis(T // ranks, PARTS[layout], q_chunk)
    k_cut = cut_axis(T // ranks, PARTS[layout], k_chunk)
    queries = _in_chunks(ids, q_cut)
    keys = _in_chunks(ids, k_cut)
    tables: dict[Source, tuple[np.ndarray, np.ndarray]] = {}
    for source in ("own", "earlier", "later"):
        pairs = visible_pairs(layout, source, True, q_cut, k_cut)
        q, k, _ = map(np.concatenate, zip(*pairs, strict=True))
        tables[source] = q, k
    by_rank = np.zeros((ranks, ranks))
    for hop in range(ranks):
        receivers: dict[Source, range] = {"own": range(ranks)}
        if hop:
            receivers = {"earlier": range(hop, ranks), "later": range(hop)}
        for source, of_source in receivers.items():
            q, k = tables[source]
            some = np.array(of_source)
            origin = (some - hop) % ranks
            live = queries.least[:, some][..., q] <= keys.most[:, origin][..., k]
            live &= keys.least[:, origin][..., k] <= queries.most[:, some][..., q]
            by_rank[hop, some] = live.any(axis=0).sum(axis=1) * q_cut.size * k_cut.size
    if gathered and ranks > 1:
        by_rank = np.stack([by_rank[0], by_rank[1:].sum(axis=0)])
    visible = float(np.mean(list(map(_visible, rows))))
    return RingWork(by_rank.max(axis=1)[None], float(by_rank.sum()), visible, ranks)


class ChunkIds(NamedTuple):
    """Ids of the documents in chunks, [rows, ranks, chunks] each."""

    least: np.ndarray
    most: np.ndarray


def _in_chunks(ids: np.ndarray, cut: AxisChunks) -> ChunkIds:
    """Return the range of the ids [rows, ranks, tokens] in each chunk."""
    chunks = [ids[..., start : start + cut.size] for start in cut.start]
    stacked = np.stack(chunks, axis=2)
    return ChunkIds(stacked.min(axis=-1), stacked.max(axis=-1))


def _visible(segment_ids: np.ndarray) -> int:
    """Count the pairs of tokens of a sequence that the masks leave."""
    _, counts = np.unique(segment_ids, return_counts=True)
    lengths = counts.astype(np.int64)
    return (lengths * (lengths + 1) // 2).sum()


def in_rings(
    segment_ids: Int[np.ndarray, "*rows T"],
    layout: Layout,
    ranks: int,
    rings: int,
    chunk: Chunk,
    gathered: bool = False,
) -> RingWork:
    """Count the work of sequences whose equal parts are on rings of their own; all wait for the slowest ring."""
    parts = np.split(segment_ids, rings, axis=-1)
    works = [ring_work(ids, layout, ranks // rings, chunk, gathered=gathered) for ids in parts]
    slowest = max(works, key=lambda work: work.slowest)
    computed = sum(work.computed for work in works)
    visible = sum(work.visible for work in works)
    return RingWork(slowest.by_hop, computed, visible, ranks)


def mean(works: Sequence[RingWork]) -> RingWork:
    """Return the work of the sequences of all works, on the same ranks."""
    by_hop, computed, visible, ranks = zip(*works, strict=True)
    return RingWork(np.concatenate(by_hop), float(np.mean(computed)), float(np.mean(visible)), ranks[0])


WorkByRings = Mapping[int, tuple[float, RingWork]]
"""Share of a run's sequences that are on so many rings, and their work."""


def overall(by_rings: WorkByRings) -> RingWork:
    """Return the mean work of all sequences, without their hops."""
    shares, works = zip(*by_rings.values(), strict=True)
    pairs = np.array([(work.slowest, work.computed, work.visible) for work in works])
    slowest, computed, visible = (shares @ pairs).tolist()
    return RingWork(np.array([[slowest]]), computed, visible, works[0].ranks)
