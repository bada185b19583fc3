"""Packing "whole": uncut documents, several per sequence, with padding where no further document fits.

A document longer than a sequence is cut into pieces of the sequence's length and a remainder; any other document is one
piece. In each epoch, the pieces are packed by their lengths (`bin_packing.py`), so that sequences are full. Then the
sequences are ordered so that those of a batch have equal attention work. Every epoch has every token once. The number
of sequences may differ between epochs, so finding the first sequence of epoch e requires packing all previous epochs.

Each token of padding is its own segment, at position 0 and not trained on, so that only chunks on the diagonal compare
it with anything. All sequences have segment ids, even without padding. With packed attention "sequence", sequences
without padding would not need them, but batches with ids and batches without ids would need two compiled programs.
"""

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from ringformer.data.packing.bin_packing import order_by_batch, pack
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.stores.token_store import TokenStore


class WholeDocuments(StoreSequences):
    """Sequences of whole documents; given `batch_size`, a sequence is a function of (seed, index).

    Sequences [k*batch_size, (k+1)*batch_size) are one batch, of nearly equal attention work. `batch_size` may
    be set until a sequence is read.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        seed: int,
        options: PackingOptions = PackingOptions(),
        *,
        batch_size: int,
        documents: np.ndarray | None = None,
    ):
        super().__init__(store, seq_len, seed, options, documents)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a number of sequences; it must be at least 1")
        begins = store.offsets[self.documents]
        ends = store.offsets[self.documents + 1]
        pieces = -(-(ends - begins) // seq_len)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        # The begin of each piece in the store, and the end of its document.
        self._begins = np.repeat(begins, pieces) + number * seq_len
        self._ends = np.repeat(ends, pieces)
        self._lengths = np.minimum(self._ends - self._begins, seq_len)
        self.batch_size = batch_size
        self._packed = lru_cache(maxsize=2)(self._pack)
        self._epoch = lru_cache(maxsize=2)(self._order)  # two: a batch may straddle epochs
        self._first = [0]  # the first sequence of each epoch so far, and of the next
        self.per_epoch: int = self._begin(1)

    @property
    def fullest(self) -> int:
        by_bin, ends, _ = self._epoch(0)
        return int(np.add.reduceat(self._lengths[by_bin], ends[:-1]).max())

    def _stretch(self, index: int, low: int, high: int) -> Batch:
        pieces = self.pieces(index)
        starts = np.concatenate([[0], np.cumsum(self._lengths[pieces])])
        filled = int(starts[-1])
        segments = len(pieces)
        end = min(high, filled)  # end of the text; the rest is padding
        size = max(end - low, 0)
        tokens, targets, positions, segment_ids = np.zeros((4, high - low), np.int32)
        mask = np.zeros(high - low, bool)
        ends = np.ones(high - low, bool)
        if size:
            i, j = np.searchsorted(starts, [low, end - 1], side="right")
            pieces = pieces[i - 1 : j]
            begins = np.maximum(starts[i - 1 : j], low)
            lengths = np.minimum(starts[i : j + 1], end) - begins
            from_store = begins + self._begins[pieces] - starts[i - 1 : j]
            # Only the last piece can be cut, by this read or by the sequence; then its last token still has a target.
            more = from_store + lengths < self._ends[pieces]
            text, trained = self._text(from_store, from_store + lengths + more)
            goes_on = np.ones(size, bool)
            goes_on[(begins + lengths - 1 - low)[~more]] = False
            tokens[:size] = text[:size]
            targets[: len(text) - 1] = text[1:]
            targets[:size][~goes_on] = 0
            mask[:size] = goes_on
            ends[:size] = ~goes_on
            mask[: len(text) - 1] &= trained[1:]
            positions[:size] = np.arange(low, end)
            segment_ids[:size] = 1
            if self.packed_attention == "document":
                positions[:size] -= np.repeat(starts[i - 1 : j], lengths).astype(np.int32)
                segment_ids[:size] = np.repeat(np.arange(i, j + 1), lengths)
                self._shift(positions[:size], index, np.arange(i - 1, j), self._lengths[pieces], lengths)
            else:
                self._shift(positions[:size], index, np.array([0]), np.array([filled]), np.array([size]))
        segments = segments if self.packed_attention == "document" else 1
        segment_ids[size:] = np.arange(max(low, filled), high) - filled + segments + 1
        return Batch(tokens, targets, positions, segment_ids, mask, ends)

    def documents_of(self, index: int) -> np.ndarray:
        return np.searchsorted(self.store.offsets, self._begins[self.pieces(index)], side="right") - 1

    def pieces(self, index: int) -> np.ndarray:
        """Return the pieces in sequence `index`, in order, int64."""
        while index >= self._first[-1]:
            self._begin(len(self._first))
        epoch = bisect_right(self._first, index) - 1
        by_bin, ends, order = self._epoch(epoch)
        bin_ = order[index - self._first[epoch]]
        return by_bin[ends[bin_] : ends[bin_ + 1]]

    def _begin(self, epoch: int) -> int:
        """Return the first sequence of an epoch."""
        while len(self._first) <= epoch:
            self._first.append(self._first[-1] + int(self._packed(len(self._first) - 1).max()) + 1)
        return self._first[epoch]

    def _pack(self, epoch: int) -> np.ndarray:
        return pack(self._lengths, self.seq_len, self._random(epoch), self.packed_attention)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays of an epoch: its pieces, bin by bin; the begin of each bin among the pieces, followed by
        the end of the last bin; and the order of the bins."""
        phase = self._begin(epoch) % self.batch_size
        rng = self._random(epoch, stream=1)
        bins, order = order_by_batch(
            self._lengths, self._packed(epoch), self.seq_len, self.batch_size, phase, rng, self.packed_attention
        )
        shuffled = rng.permutation(len(bins))
        by_bin = shuffled[np.argsort(bins[shuffled], kind="stable")]
        return by_bin, np.concatenate([[0], np.cumsum(np.bincount(bins))]), order
