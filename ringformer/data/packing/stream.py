"""Packing "stream": the documents of a store are joined end to end and cut every T tokens.

In epoch e the documents are permuted by a counter-based generator keyed with (seed, e) and concatenated. The stream is
cut every T tokens, and a tail that does not fill a sequence is dropped. The pieces are permuted too, so that a long
document does not fill several consecutive steps. Targets are the next tokens of the stream.
"""

from functools import lru_cache

import numpy as np

from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.stores.token_store import TokenStore


class DocumentStream(StoreSequences):
    """Documents end to end, cut every `seq_len` tokens, without padding."""

    def __init__(self, store: TokenStore, seq_len: int, seed: int, options: PackingOptions = PackingOptions()):
        super().__init__(store, seq_len, seed, options)
        self._lengths = np.diff(store.offsets)[self.documents]
        tokens = int(self._lengths.sum())
        if tokens < seq_len + 1:
            raise ValueError(
                f"{store.path} has {tokens} tokens, fewer than the {seq_len + 1} of one sequence: "
                f"seq_len={seq_len} and the last target; shorten seq_len, or build a larger store"
            )
        self.per_epoch: int = (tokens - 1) // seq_len
        self._epoch = lru_cache(maxsize=2)(self._shuffle)  # two: a batch may straddle epochs

    @property
    def tokens_per_sequence(self) -> float:
        return float(self.seq_len)

    @property
    def fullest(self) -> int:
        return self.seq_len

    def _stretch(self, index: int, low: int, high: int) -> Batch:
        order, starts, start = self._cut(index)
        first = start + low
        last = start + high  # in the stream: the first token and the last target
        i, j = np.searchsorted(starts, [first, last], side="right")
        starts, ends, documents = starts[i - 1 : j], starts[i : j + 1], order[i - 1 : j]
        begins = np.maximum(starts, first)
        stops = np.minimum(ends, last + 1)
        shift = self.store.offsets[documents] - starts
        lengths = stops - begins  # from the stream to the store

        text, trained = self._text(begins + shift, stops + shift)
        same = np.ones(high - low, bool)
        same[ends[:-1] - 1 - first] = False
        positions = np.arange(low, high, dtype=np.int32)
        segment_ids = None
        if self.packed_attention == "document":
            document_starts = (np.maximum(starts, start) - start).astype(np.int32)
            positions -= np.repeat(document_starts, lengths)[:-1]
            segment_ids = np.repeat(np.arange(i, j + 1, dtype=np.int32), lengths)[:-1]
            in_sequence = np.minimum(ends, start + self.seq_len) - np.maximum(starts, start)
            lengths[-1] -= 1  # the last target's position is not read
            self._shift(positions, index, np.arange(i - 1, j), in_sequence, lengths)
        else:
            self._shift(positions, index, np.array([0]), np.array([self.seq_len]), np.array([high - low]))
        return Batch(text[:-1], text[1:], positions, segment_ids, same & trained[1:], ~same)

    def documents_of(self, index: int) -> np.ndarray:
        order, starts, start = self._cut(index)
        return order[starts[:-1] < start + self.seq_len]

    def _cut(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the documents that a sequence and its last target need, the start of each document in the stream (and
        the end of the last one), and the start of the sequence."""
        epoch, row = divmod(index, self.per_epoch)
        order, starts, pieces = self._epoch(epoch)
        start = int(pieces[row]) * self.seq_len
        first, last = np.searchsorted(starts, [start, start + self.seq_len], side="right") - 1
        return order[first : last + 1], starts[first : last + 2], start

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays of an epoch: the order of its documents; the start of each document in the stream,
        followed by the end of the stream, int64 [documents + 1]; and the order of the stream's pieces, int64
        [per_epoch]."""
        rng = self._random(epoch)
        order = rng.permutation(len(self.documents))
        starts = np.concatenate([[0], np.cumsum(self._lengths[order])])
        return self.documents[order], starts, rng.permutation(self.per_epoch)
