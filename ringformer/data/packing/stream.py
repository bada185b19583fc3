"""Packing "stream": the documents of a store end to end, cut every T tokens.

In epoch e the documents, permuted by a counter-based generator keyed with (seed, e), lie end to end. The stream is cut
every T tokens, a tail that does not fill a sequence is dropped, and the pieces are permuted in their turn, lest a long
document fill several steps one after the other. Targets are the stream's tokens one further.
"""

from functools import lru_cache

import numpy as np

from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.stores.token_store import TokenStore


class DocumentStream(StoreSequences):
    """Documents end to end, cut every `seq_len` tokens; no token of padding."""

    def __init__(self, store: TokenStore, seq_len: int, seed: int, options: PackingOptions = PackingOptions()):
        super().__init__(store, seq_len, seed, options)
        self.has_segments = self.packed_attention == "document"
        self._lengths = np.diff(store.offsets)[self.documents]
        tokens = int(self._lengths.sum())
        if tokens < seq_len + 1:
            raise ValueError(
                f"{store.path} has {tokens} tokens, fewer than the {seq_len + 1} of one sequence: "
                f"seq_len={seq_len} and the last target; shorten seq_len, or build a larger store"
            )
        self.per_epoch = (tokens - 1) // seq_len
        self._epoch = lru_cache(maxsize=2)(self._shuffle)  # two: a batch may straddle epochs

    @property
    def fullest(self) -> int:
        return self.seq_len

    def read(self, index: int, positions: np.ndarray) -> Batch:
        self._check(index, positions)
        order, starts, start = self._cut(index)
        shift = self.store.offsets[order] - starts[:-1]  # from a place in the stream to one in the store

        positions = np.asarray(positions, np.int64)
        stream = start + positions
        slot = np.searchsorted(starts, stream, side="right") - 1
        tokens = self._gather(self.store.tokens, stream + shift[slot])

        same = stream + 1 < starts[slot + 1]
        target_places = stream + 1 + shift[slot + ~same]
        # A target is the token after, which is at hand except where a run of positions ends.
        run_ends = np.append(np.diff(stream) != 1, True)[: len(stream)]
        targets = np.roll(tokens, -1)
        targets[run_ends] = self._gather(self.store.tokens, target_places[run_ends])

        mask = same
        if self.has_segments:
            positions = stream - np.maximum(starts[slot], start)
        if self.store.mask is not None:
            mask = same & (self._gather(self.store.mask, target_places) != 0)
        return Batch(
            tokens=tokens.astype(np.int32),
            targets=targets.astype(np.int32),
            positions=positions.astype(np.int32),
            segment_ids=(slot + 1).astype(np.int32) if self.has_segments else None,
            mask=mask,
            ends=~same,
        )

    def documents_of(self, index: int) -> np.ndarray:
        order, starts, start = self._cut(index)
        return order[starts[:-1] < start + self.seq_len]

    def _cut(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Of the epoch's documents those that a sequence and its last target need; where each starts in the stream,
        with the end; and where the sequence does."""
        epoch, row = divmod(index, self.per_epoch)
        order, starts, pieces = self._epoch(epoch)
        start = int(pieces[row]) * self.seq_len
        first, last = np.searchsorted(starts, [start, start + self.seq_len], side="right") - 1
        return order[first : last + 1], starts[first : last + 2], start

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The epoch's order of documents; where each starts in its stream, with the end, int64 [documents + 1]; and
        the order of the stream's pieces, int64 [per_epoch]."""
        rng = self._random(epoch)
        order = rng.permutation(len(self.documents))
        starts = np.concatenate([[0], np.cumsum(self._lengths[order])])
        return self.documents[order], starts, rng.permutation(self.per_epoch)
