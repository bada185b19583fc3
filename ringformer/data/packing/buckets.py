"""Buckets: batches by the length of their longest document, for rings that are just long enough.

A sequence of bucket k consists of 2^k pieces of equal length, each packed whole (`whole_documents.py`). So no document
crosses from piece to piece, and 2^k rings can compute the pieces side by side. A document belongs to the bucket with
the shortest pieces that it fits. But only one document of more than half a piece fits into it, so short ones fill the
room beside it, and if there are too few of them, long ones go to pieces of twice the length (`deal`).

All sequences of a batch belong to one bucket. Buckets take turns in proportion to their batches. Like all packings, the
content of a sequence is a function of (seed, index), whatever the mesh.
"""

import numpy as np

from ringformer.data.packing.mixture import Turns, integer_shares
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch
from ringformer.data.packing.stream import DocumentStream
from ringformer.data.packing.whole_documents import WholeDocuments
from ringformer.data.stores.token_store import TokenStore

PERIOD = 1000
LEAST = 0.01
"""Turns to which the shares of buckets are rounded, and the least share of a bucket. So documents of a small bucket
occur up to 5% too often or too rarely."""
FULL = 0.9
FILLED = 0.97
SMALL = 4
"""Share of a piece that counts as full; share of the room in other pieces, beside a long document, that short ones
fill; and the most of a piece, 1/4, that a short one may take."""


def deal(
    lengths: np.ndarray, seq_len: int, buckets: int, batch_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Distribute documents over the buckets 0 to `buckets`; return the indices of each bucket's documents, ascending.

    Args:
      lengths: tokens of each document. Documents longer than a sequence are cut, and belong to bucket 0.
      batch_size: sequences of a batch. A bucket that is used has at least about one batch, and `LEAST` of all tokens:
        too small ones join the bucket with pieces of twice the length, and bucket 0 gets some documents of others.
    """
    bucket = np.zeros(len(lengths), int)
    for k in range(1, buckets + 1):
        bucket += lengths <= seq_len >> k
    order = rng.permutation(len(lengths))
    for k in range(buckets + 1):
        length = seq_len >> k
        of = bucket[order]
        long = order[(of == k) & (lengths[order] > length // 2)]
        if k < buckets:
            is_small = (of > k) & (lengths[order] <= length // SMALL)
        else:
            is_small = (of == k) & (lengths[order] <= length // 2)
        small = order[is_small]
        empty = -lengths[long] % length
        long = long[empty > (1 - FULL) * length]
        empty = empty[empty > (1 - FULL) * length]
        filled = np.ones(len(long), bool)
        if k > 0:
            filled = FILLED * np.cumsum(empty) <= lengths[small].sum()
        bucket[long[~filled]] = k - 1
        if k < buckets:
            bucket[small[np.cumsum(lengths[small]) <= FILLED * empty[filled].sum()]] = k
    enough = max(batch_size * seq_len, LEAST * lengths.sum())
    if lengths[bucket == 0].sum() < enough and (bucket == 0).any():  # few long documents: others join them
        others = order[bucket[order] > 0]
        bucket[others[np.cumsum(lengths[others]) <= enough]] = 0
    for k in range(buckets, 0, -1):
        if lengths[bucket == k].sum() < enough:
            bucket[bucket == k] = k - 1
    return [np.flatnonzero(bucket == k) for k in range(buckets + 1)]


class LengthBuckets:
    """Sequences of a store in buckets; see `Mixture`, whose methods it has.

    Attributes:
      parts: sequences of each bucket that has documents, pieces of its length.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int, options: PackingOptions, *, batch_size: int):
        if options.buckets >= int(seq_len).bit_length() or seq_len % 2**options.buckets:
            raise ValueError(
                f"data.buckets={options.buckets} halves a sequence {options.buckets} times: seq_len={seq_len} is not "
                "divisible by so many twos"
            )
        self.seq_len = seq_len
        self._batch_size = batch_size
        self._store = store
        self.selections: list[DocumentStream] = [DocumentStream(store, seq_len, seed, options)]
        selected = self.selections[0].documents
        rng = np.random.Generator(np.random.Philox(key=seed))
        dealt = deal(np.diff(store.offsets)[selected], seq_len, options.buckets, batch_size, rng)
        self.parts: list[WholeDocuments] = []
        self._halvings: list[int] = []
        batches = []
        whole_batches = []
        for k, own in enumerate(dealt):
            if len(own):
                rows = batch_size << k
                packed = WholeDocuments(store, seq_len >> k, seed, options, batch_size=rows, documents=selected[own])
                self.parts.append(packed)
                self._halvings.append(k)
                batches.append(packed.per_epoch / rows)
                whole_batches.append(packed.per_epoch // rows)
        self.shares: list[int] = integer_shares(batches, PERIOD)
        self._turns = Turns(self.shares, seed)
        self.per_epoch: int = self._turns.until_any(whole_batches) * batch_size

    @property
    def share_by_halvings(self) -> dict[int, float]:
        """Share of the batches that each bucket has."""
        total = sum(self.shares)
        return {k: share / total for k, share in zip(self._halvings, self.shares, strict=True)}

    def halvings(self, step: int) -> int:
        """Return how often the sequences of a step are halved: the bucket of its documents."""
        number, _ = self._turns.source(step)
        return self._halvings[number]

    def _pieces(self, index: int) -> tuple[int, WholeDocuments, int]:
        """Return the bucket of sequence `index`, its packed pieces, and the number of the first piece."""
        step, row = divmod(index, self._batch_size)
        number, batch = self._turns.source(step)
        k = self._halvings[number]
        return k, self.parts[number], (batch * self._batch_size + row) << k

    def read(self, index: int, positions: np.ndarray) -> Batch:
        """See `StoreSequences.read`."""
        k, packed, first = self._pieces(index)
        if k == 0:
            return packed.read(first, positions)
        length = self.seq_len >> k
        pieces, within = np.divmod(positions, length)
        numbers = np.zeros((4, len(positions)), np.int32)
        masks = np.zeros((2, len(positions)), bool)
        fields = [*numbers, *masks]
        for piece in np.unique(pieces).tolist():
            here = pieces == piece
            part = packed.read(first + piece, within[here])
            part = part._replace(segment_ids=part.segment_ids + piece * length)  # a piece has at most `length` ids
            for field, x in zip(fields, part[: len(fields)], strict=True):
                field[here] = x
        return Batch(*fields)

    def documents_of(self, index: int) -> tuple[TokenStore, np.ndarray]:
        """Return the store, and the numbers of the sequence's documents in the store, in order, int64."""
        k, packed, first = self._pieces(index)
        documents = [packed.documents_of(piece) for piece in range(first, first + (1 << k))]
        return self._store, np.concatenate(documents)

    def passes(self, sequences: int) -> dict[str, float]:
        """Count the passes that so many sequences make through the documents of the bucket that repeats most."""
        each = sequences / sum(self.shares)
        most = 0.0
        for k, packed, own in zip(self._halvings, self.parts, self.shares, strict=True):
            most = max(most, each * own * 2**k / packed.per_epoch)
        return {str(self._store.path): most}

    @property
    def bytes_read(self) -> int:
        """Bytes of the store's tokens and mask that have been requested so far."""
        return sum(packed.bytes_read for packed in self.parts)

    @property
    def masked(self) -> bool:
        """True if the store has tokens that are not trained on, as in chats."""
        return self._store.mask is not None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per trained token."""
        return self.selections[0].bytes_per_token
