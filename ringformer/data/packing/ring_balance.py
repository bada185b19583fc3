"""Balance of documents on a ring: how much longer than its ideal attention takes, by layout, chunks and buckets.

Documents are packed whole, by their lengths alone; no token is read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from rich.console import Console
from rich.table import Table

from ringformer.data.packing.bin_packing import order_by_batch, pack
from ringformer.data.packing.buckets import deal
from ringformer.data.packing.ring_work import RingWork, WorkByRings, in_rings, kernel_share, mean, overall, ring_work
from ringformer.ops.layouts import PARTS, Layout, check_layout

BATCH = 4
SAMPLES = 24
"""Sequences of a batch of a bucket, and most sequences without buckets, that are counted."""
MOST_DOCUMENTS = 50_000
MOST_RANKS = 256
"""Most documents of a store to pack, drawn at random; and ranks of the largest ring that is counted."""
CHUNKS = 2048, 1024, 512, 256
LEAST_CHUNK = 128
"""Tokens of the smallest chunk to count, unless a part of a shard has fewer: the TPU kernels have none below."""
LAYOUTS: tuple[Layout, ...] = ("zigzag", "striped")


class Balance(NamedTuple):
    """Work of attention on a ring, for one way to lay out documents."""

    layout: Layout
    buckets: int
    chunk: int
    by_rings: WorkByRings

    @property
    def work(self) -> RingWork:
        return overall(self.by_rings)

    @property
    def seconds(self) -> float:
        """Duration over that of the visible pairs alone at the kernels' full rate."""
        return self.work.product / kernel_share(self.chunk)


def balances(
    lengths: Int64[np.ndarray, " N"],
    seq_len: int,
    ranks: int,
    chunks: Sequence[int] = CHUNKS,
    rows: int = 1,
    gathered: bool = False,
) -> list[Balance]:
    """Count the mean work of a sequence of documents on a ring for each layout and chunk, without buckets and with as
    many as halve the ring down to an odd number of ranks. Chunks are at most a part of a shard.

    Balance and excess are those of some sequences; their visible pairs, the mean over all documents.

    Args:
      rows: sequences that a device computes at once. gathered: as in `ring_work`.

    Raises ValueError if no such ring can hold the sequence, or if it is too large to count.
    """
    if not 1 <= ranks <= MOST_RANKS or seq_len < 1:
        raise ValueError(f"a ring of {ranks} ranks for {seq_len} tokens: give 1 to {MOST_RANKS} ranks, and some tokens")
    rng = np.random.default_rng(0)
    for layout in LAYOUTS:
        check_layout(layout, seq_len, ranks)
    lengths = lengths[np.sort(rng.permutation(len(lengths))[:MOST_DOCUMENTS])]
    whole, rest = np.divmod(lengths, seq_len)  # longer documents are cut
    lengths = np.concatenate([np.full(whole.sum(), seq_len), rest[rest > 0]])
    halvings = (ranks & -ranks).bit_length() - 1
    packed = [segments(row, seq_len) for row in sequences_of(lengths, seq_len)]
    batches = batches_of(lengths, seq_len, halvings)
    visible = seq_len * float((lengths * (lengths + 1) / 2).sum() / lengths.sum())
    counted = []
    for layout in LAYOUTS:
        for chunk in _sizes(chunks, seq_len // ranks // PARTS[layout]):
            works = [ring_work(ids, layout, ranks, chunk, gathered=gathered) for ids in _at_once(packed, rows)]
            ways: dict[int, WorkByRings] = {0: {1: (1.0, mean(works))}}
            if halvings:
                ways[halvings] = in_buckets(batches, ranks, layout, chunk, rows, gathered)
            for buckets, by_rings in ways.items():
                usual = visible / overall(by_rings).visible
                as_usual = {n: (share, work.times(usual)) for n, (share, work) in by_rings.items()}
                counted.append(Balance(layout, buckets, chunk, as_usual))
    return counted


def _sizes(chunks: Sequence[int], part: int) -> list[int]:
    """Return the sizes that chunks have in a part of a shard of `part` tokens, the largest first: those of at least
    `LEAST_CHUNK`, or else the largest."""
    sizes = {min(chunk, part) for chunk in chunks}
    large = {size for size in sizes if size >= LEAST_CHUNK}
    return sorted(large or {max(sizes)}, reverse=True)


def sequences_of(lengths: np.ndarray, seq_len: int) -> list[np.ndarray]:
    """Return the lengths of the documents of some packed sequences, in order."""
    rng = np.random.default_rng(0)
    bins = pack(lengths, seq_len, rng)
    return [lengths[bins == b] for b in rng.permutation(bins.max() + 1)[:SAMPLES]]


def segments(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the ids of a sequence's documents; each token of padding has its own."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([ids, len(lengths) + np.arange(seq_len - len(ids))])


def batches_of(lengths: np.ndarray, seq_len: int, halvings: int) -> dict[int, tuple[float, list[np.ndarray]]]:
    """Return, by bucket, its share of the tokens, and the ids of the documents in the sequences of a batch."""
    rng = np.random.default_rng(1)
    batches = {}
    for k, own in enumerate(deal(lengths, seq_len, halvings, BATCH, rng)):
        if not len(own):
            continue
        mine = lengths[own]
        length = seq_len >> k
        bins, order = order_by_batch(mine, pack(mine, length, rng), length, BATCH << k, 0, rng)
        whole = min(len(order), BATCH << k) >> k << k
        pieces = [segments(mine[bins == b], length) for b in order[:whole]]
        rows = []
        for row in _in_groups(pieces, 2**k):
            ids = row + length * np.arange(2**k)[:, None]
            rows.append(ids.reshape(-1))
        batches[k] = float(mine.sum() / lengths.sum()), rows
    return batches


def _in_groups(items: list[np.ndarray], size: int) -> list[np.ndarray]:
    """Stack every `size` arrays, in order; the last group may be smaller."""
    return [np.stack(items[i : i + size]) for i in range(0, len(items), size)]


def _at_once(sequences: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """Group the ids of sequences as a device computes them; a last, smaller group is left out."""
    whole = len(sequences) // rows * rows or len(sequences)
    return _in_groups(sequences[:whole], rows)


def in_buckets(
    batches: dict[int, Any], ranks: int, layout: Layout, chunk: int, rows: int = 1, gathered: bool = False
) -> WorkByRings:
    """Count the work of each bucket."""
    counted = {}
    for k, (share, sequences) in batches.items():
        rings = 2**k
        works = [in_rings(ids, layout, ranks, rings, chunk, gathered=gathered) for ids in _at_once(sequences, rows)]
        counted[rings] = share, mean(works)
    return counted


def show_balance(counted: list[Balance], seq_len: int, ranks: int, console: Console) -> None:
    """Print how much longer than its ideal attention takes on a ring, for documents packed whole."""
    table = Table(title=f"Attention over its ideal: sequences of {seq_len:,} tokens on a ring of {ranks}", box=None)
    table.add_column("layout, data.buckets")
    table.add_column("by tokens of a chunk")
    by_way: dict[str, list[str]] = {}
    for x in counted:
        products = by_way.setdefault(f"{x.layout}, {x.buckets}", [])
        products.append(f"{x.chunk}: {x.work.product:.2f}")
    for way, products in by_way.items():
        table.add_row(way, "   ".join(products))
    console.print(table)
    best = min(counted, key=lambda x: x.seconds)
    console.print(
        "slowest rank over the mean x computed over visible pairs; fastest, with the kernels' efficiency (v5e): "
        f"layout {best.layout}, data.packing=whole, data.buckets={best.buckets}, chunks of {best.chunk}"
    )
