"""Buckets: batches by the length of their longest document, for rings that are just long enough.

Bucket k has the documents of more than 1/2^(k+1) and at most 1/2^k of a sequence; bucket 0 also longer ones, and the
last bucket all shorter ones. A sequence of bucket k consists of 2^k pieces of equal length, each packed whole
(`whole_documents.py`). So no document crosses from piece to piece, and 2^k rings can compute the pieces side by side.

All sequences of a batch belong to one bucket. Buckets take turns in proportion to their batches. Like all packings, the
content of a sequence is a function of (seed, index), whatever the mesh.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringformer.data.packing.mixture import Turns
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.packing.stream import DocumentStream
from ringformer.data.packing.whole_documents import WholeDocuments
from ringformer.data.stores.token_store import TokenStore

PERIOD = 1000
"""Turns by which the shares of buckets are rounded: a bucket's documents occur up to 1/1000 of all batches too often or
too rarely."""


class LengthBuckets:
    """Sequences of a store in buckets; see `Mixture`, whose methods it has."""

    def __init__(self, store: TokenStore, seq_len: int, seed: int, options: PackingOptions, *, batch_size: int):
        if seq_len % 2**options.buckets:
            raise ValueError(
                f"data.buckets={options.buckets} halves a sequence {options.buckets} times: seq_len={seq_len} is not "
                f"divisible by {2**options.buckets}"
            )
        self.seq_len, self._batch_size, self._store = seq_len, batch_size, store
        self.selections = [DocumentStream(store, seq_len, seed, options)]
        lengths = np.diff(store.offsets)[self.selections[0].documents]
        self._parts: list[tuple[int, WholeDocuments]] = []
        for k in range(options.buckets + 1):
            longest = seq_len >> k if k else int(lengths.max())
            fewest = (seq_len >> k) // 2 + 1 if k < options.buckets else 0
            if ((lengths >= fewest) & (lengths <= longest)).any():
                shortest = max(fewest, options.min_length)
                of_bucket = replace(options, min_length=min(shortest, longest), max_length=longest)
                packed = WholeDocuments(store, seq_len >> k, seed, of_bucket, batch_size=batch_size << k)
                self._parts.append((k, packed))
        batches = [packed.per_epoch / (batch_size << k) for k, packed in self._parts]
        shares = [max(1, round(PERIOD * count / sum(batches))) for count in batches]
        self.shares = [share // math.gcd(*shares) for share in shares]
        self._turns = Turns(self.shares, seed)
        whole = [packed.per_epoch // (batch_size << k) for k, packed in self._parts]
        steps = min(self._turns.until(number, count) for number, count in enumerate(whole))
        self.per_epoch = max(steps, 1) * batch_size

    def halvings(self, step: int) -> int:
        """Return how often the sequences of a step are halved: the bucket of its documents."""
        return self._parts[self._turns.source(step)[0]][0]

    def _pieces(self, index: int) -> tuple[int, WholeDocuments, int]:
        """Return the bucket of sequence `index`, its packed pieces, and the number of the first piece."""
        step, row = divmod(index, self._batch_size)
        number, batch = self._turns.source(step)
        k, packed = self._parts[number]
        return k, packed, (batch * self._batch_size + row) << k

    def read(self, index: int, positions: np.ndarray) -> Batch:
        """See `StoreSequences.read`."""
        k, packed, first = self._pieces(index)
        if k == 0:
            return packed.read(first, positions)
        length = self.seq_len >> k
        pieces, within = np.divmod(positions, length)
        fields = [np.zeros(len(positions), dtype) for dtype in (np.int32,) * 4 + (bool,) * 2]
        for piece in np.unique(pieces).tolist():
            here = pieces == piece
            part = packed.read(first + piece, within[here])
            part = part._replace(segment_ids=part.segment_ids + piece * length)  # a piece has at most `length` ids
            for field, x in zip(fields, part, strict=True):
                field[here] = x
        return Batch(*fields)

    def documents_of(self, index: int) -> tuple[TokenStore, np.ndarray]:
        """Return the store, and the numbers of the sequence's documents in the store, in order, int64."""
        k, packed, first = self._pieces(index)
        return self._store, np.concatenate([packed.documents_of(first + piece) for piece in range(1 << k)])

    def passes(self, sequences: int) -> dict[str, float]:
        """Count the passes that so many sequences make through the documents of the bucket that repeats most."""
        each = sequences / sum(self.shares)
        parts = zip(self._parts, self.shares, strict=True)
        return {str(self._store.path): max(each * own * 2**k / packed.per_epoch for (k, packed), own in parts)}

    @property
    def parts(self) -> Sequence[StoreSequences]:
        """Sequences of each bucket, pieces of its length."""
        return [packed for _, packed in self._parts]

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
