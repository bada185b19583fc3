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
from jaxtyping import Int, Int64

from ringformer.ops.layouts import PARTS, Layout, Source, permutation
from ringformer.ops.work_list import cut_axis, visible_pairs

KERNEL_SHARES = {2048: 0.96, 1024: 0.91, 512: 0.72, 256: 0.35}
"""Share of ideal cycles that the TPU kernels reach on v5e with segment ids, by tokens of a chunk: two forwards and a
backward, the mean of steps with and without a mask (`tests/estimate/kernels/test_slot_use.py` counts them)."""


def kernel_share(chunk: int) -> float:
    """Return the share of a chunk of any size: between two of `KERNEL_SHARES`, or in proportion to the smallest."""
    sizes = sorted(KERNEL_SHARES)
    if chunk < sizes[0]:
        return KERNEL_SHARES[sizes[0]] * chunk / sizes[0]
    return float(np.interp(chunk, sizes, [KERNEL_SHARES[size] for size in sizes]))


PAIRS = 4
"""Number of the fields of `RingWork` that count pairs, the first ones."""


class RingWork(NamedTuple):
    """Pairs of tokens of a sequence on a ring of `ranks`, or their mean over some sequences."""

    slowest: float
    """Pairs of the slowest rank, summed over hops."""
    own: float
    """Part of `slowest`: before the first hop, on the rank's own keys."""
    computed: float
    """Pairs that all ranks compute."""
    visible: float
    """Pairs that the masks leave."""
    ranks: int
    idle_hops: int
    """Hops whose keys no rank needs."""

    def times(self, factor: float) -> "RingWork":
        """Return so many times the pairs."""
        slowest, own, computed, visible = (factor * x for x in self[:PAIRS])
        return self._replace(slowest=slowest, own=own, computed=computed, visible=visible)

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


def ring_work(
    segment_ids: Int[np.ndarray, " T"],
    layout: Layout,
    ranks: int,
    chunk: int,
    order: Int64[np.ndarray, " T"] | None = None,
) -> RingWork:
    """Count the work of one sequence on a ring, of queries and keys in chunks of `chunk` tokens.

    Args:
      segment_ids: ids of the documents in natural order, ascending.
      order: the token at each place of the concatenated shards; None: that of the layout.
    """
    T = len(segment_ids)
    tokens = permutation(layout, T, ranks) if order is None else order
    ids = segment_ids[tokens].reshape(ranks, T // ranks)
    cut = cut_axis(T // ranks, PARTS[layout], chunk)
    chunks = np.stack([ids[:, start : start + cut.size] for start in cut.start], axis=1)
    least, most = chunks.min(axis=-1), chunks.max(axis=-1)  # [ranks, chunks]
    tables: dict[Source, tuple[np.ndarray, np.ndarray]] = {}
    for source in ("own", "earlier", "later"):
        pairs = visible_pairs(layout, source, True, cut, cut)
        tables[source] = np.concatenate([x.q for x in pairs]), np.concatenate([x.k for x in pairs])
    by_hop = np.zeros((ranks, ranks), np.int64)
    for hop in range(ranks):
        receivers: dict[Source, range] = {"own": range(ranks)}
        if hop:
            receivers = {"earlier": range(hop, ranks), "later": range(hop)}
        for source, of_source in receivers.items():
            q, k = tables[source]
            some = np.array(of_source)
            origin = (some - hop) % ranks
            live = (least[some][:, q] <= most[origin][:, k]) & (least[origin][:, k] <= most[some][:, q])
            by_hop[hop, some] = live.sum(axis=1) * cut.size**2
    lengths = np.unique(segment_ids, return_counts=True)[1].astype(np.int64)
    visible = int((lengths * (lengths + 1) // 2).sum())
    idle = int((by_hop.max(axis=1) == 0).sum())
    slowest = by_hop.max(axis=1)
    return RingWork(int(slowest.sum()), int(slowest[0]), int(by_hop.sum()), visible, ranks, idle)


def in_rings(segment_ids: Int[np.ndarray, " T"], layout: Layout, ranks: int, rings: int, chunk: int) -> RingWork:
    """Count the work of one sequence whose equal parts are on rings of their own; all wait for the slowest ring."""
    works = [ring_work(ids, layout, ranks // rings, chunk) for ids in np.split(segment_ids, rings)]
    return RingWork(
        max(work.slowest for work in works),
        max(work.own for work in works),
        sum(work.computed for work in works),
        sum(work.visible for work in works),
        ranks,
        min(work.idle_hops for work in works),
    )


def mean(works: Sequence[RingWork], weights: Sequence[float] | None = None) -> RingWork:
    """Return the mean work of some sequences on the same ranks; hops are idle that are idle for all."""
    slowest, own, computed, visible = (
        float(np.average(x, weights=weights)) for x in list(zip(*works, strict=True))[:PAIRS]
    )
    return RingWork(slowest, own, computed, visible, works[0].ranks, min(work.idle_hops for work in works))


WorkByRings = Mapping[int, tuple[float, RingWork]]
"""Share of a run's sequences that are on so many rings, and their mean work."""


def overall(by_rings: WorkByRings) -> RingWork:
    """Return the mean work of all sequences."""
    shares, works = zip(*by_rings.values(), strict=True)
    return mean(works, shares)
