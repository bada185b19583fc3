"""Packing "whole": documents uncut, several to a sequence, with padding where none fits.

A document longer than a sequence is cut into pieces of that length and a rest; every other one is a piece. In epoch e
the pieces are packed by their lengths alone (`bin_packing.py`), so that sequences are full, and ordered so that the
sequences of a batch have equal attention work. Every epoch has every token once. The number of sequences may differ
between epochs, so the first sequence of epoch e is known once all epochs before it were packed.

Each token of padding is a segment of its own, at position 0 and not trained on: only chunks that lie on the diagonal
compare it with anything. All sequences have segment ids, those without padding too: with packed attention "sequence"
they could do without, but batches with and without ids are two compiled programs.
"""

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from ringformer.data.packing.bin_packing import order_by_batch, pack
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.stores.token_store import TokenStore


class WholeDocuments(StoreSequences):
    """Sequences of whole documents; a function of (seed, index), given `batch_size`.

    Sequences [k*batch_size, (k+1)*batch_size) are one batch, of nearly equal attention work.
    """

    has_segments = True

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        seed: int,
        options: PackingOptions = PackingOptions(),
        *,
        batch_size: int,
    ):
        super().__init__(store, seq_len, seed, options)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a number of sequences; it must be at least 1")
        begins, ends = store.offsets[self.documents], store.offsets[self.documents + 1]
        pieces = -(-(ends - begins) // seq_len)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        # Of each piece: where it begins in the store, and where its document ends.
        self._begins, self._ends = np.repeat(begins, pieces) + number * seq_len, np.repeat(ends, pieces)
        self._lengths = np.minimum(self._ends - self._begins, seq_len)
        self._batch_size = batch_size
        self._packed = lru_cache(maxsize=2)(self._pack)
        self._epoch = lru_cache(maxsize=2)(self._order)  # two: a batch may straddle epochs
        self._first = [0]  # the first sequence of each epoch that was met, and of the one after
        self.per_epoch = self._begin(1)

    @property
    def fullest(self) -> int:
        by_bin, ends, _ = self._epoch(0)
        return int(np.add.reduceat(self._lengths[by_bin], ends[:-1]).max())

    def read(self, index: int, positions: np.ndarray) -> Batch:
        self._check(index, positions)
        positions = np.asarray(positions, np.int64)
        pieces = self.pieces(index)
        starts = np.concatenate([[0], np.cumsum(self._lengths[pieces])])
        slot = np.searchsorted(starts, positions, side="right") - 1
        held = slot < len(pieces)  # by a document, not by padding
        slot, piece, within = slot[held], pieces[slot[held]], (positions - starts[slot])[held]

        places = self._begins[piece] + within
        tokens = self._gather(self.store.tokens, places)
        trained = goes_on = places + 1 < self._ends[piece]
        # A target is the token after, which is at hand except where a run of places ends.
        fetched = trained & np.append(np.diff(places) != 1, True)[: len(places)]
        targets = np.where(trained, np.roll(tokens, -1), 0)
        targets[fetched] = self._gather(self.store.tokens, places[fetched] + 1)
        if self.store.mask is not None:
            trained = goes_on.copy()
            trained[goes_on] = self._gather(self.store.mask, places[goes_on] + 1) != 0

        segment, segments = slot + 1, len(pieces)
        if self.packed_attention == "sequence":
            within, segment, segments = positions[held], np.ones_like(slot), 1
        padding = 1 + segments + positions - starts[-1]

        def full(values, where_padded=0):
            out = np.empty(len(positions), np.int32)
            out[held] = values
            out[~held] = where_padded
            return out

        return Batch(
            tokens=full(tokens),
            targets=full(targets),
            positions=full(within),
            segment_ids=full(segment, padding[~held]),
            mask=full(trained).astype(bool),
            ends=full(~goes_on, True).astype(bool),
        )

    def documents_of(self, index: int) -> np.ndarray:
        return np.searchsorted(self.store.offsets, self._begins[self.pieces(index)], side="right") - 1

    def pieces(self, index: int) -> np.ndarray:
        """The pieces that sequence `index` holds, in order, int64."""
        while index >= self._first[-1]:
            self._begin(len(self._first))
        epoch = bisect_right(self._first, index) - 1
        by_bin, ends, order = self._epoch(epoch)
        bin_ = order[index - self._first[epoch]]
        return by_bin[ends[bin_] : ends[bin_ + 1]]

    def lengths(self, index: int) -> np.ndarray:
        """The tokens of each piece in sequence `index`, int64."""
        return self._lengths[self.pieces(index)]

    def _begin(self, epoch: int) -> int:
        """The first sequence of an epoch."""
        while len(self._first) <= epoch:
            self._first.append(self._first[-1] + int(self._packed(len(self._first) - 1).max()) + 1)
        return self._first[epoch]

    def _pack(self, epoch: int) -> np.ndarray:
        return pack(self._lengths, self.seq_len, self._random(epoch), self.packed_attention)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch's pieces bin by bin; where each bin begins among them, with the end; and the order of bins."""
        phase = self._begin(epoch) % self._batch_size
        rng = self._random(epoch, stream=1)
        bins, order = order_by_batch(
            self._lengths, self._packed(epoch), self.seq_len, self._batch_size, phase, rng, self.packed_attention
        )
        shuffled = rng.permutation(len(bins))
        by_bin = shuffled[np.argsort(bins[shuffled], kind="stable")]
        return by_bin, np.concatenate([[0], np.cumsum(np.bincount(bins))]), order
