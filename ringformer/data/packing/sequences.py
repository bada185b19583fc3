"""Packed sequences: the common base of every packing of a store's documents.

The content of sequence `index` is a function of (seed, index): there is no iterator state to save, and any part of a
sequence can be read without the rest.

In every packing, a token attends to its own document ("document") or to the whole sequence before it ("sequence"). This
affects only positions and segments: a document's last token predicts nothing in either case.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.shifted_positions import check_range, draw_shifts
from ringformer.data.stores.token_store import TokenStore

MOST_RUNS = 64
"""Largest number of runs of positions that are read one by one; a ring's zigzag layout has two runs for each rank."""

_SHIFTS = 2
"""Stream of random numbers of a sequence's shifts; epochs have streams 0 and 1."""


class Batch(NamedTuple):
    """Packed tokens with positions, segments and masks; numpy or jax arrays, [B, T] from a loader."""

    tokens: Any
    """int32: the inputs."""
    targets: Any
    """int32: the next token; arbitrary where the mask is False."""
    positions: Any
    """int32: index in the document, counted from the sequence's start if the document began before the sequence. With
    packed attention "sequence", this is the index in the sequence; for padding, it is 0. With a position_range, those
    behind a cut in each document are shifted (`shifted_positions.py`)."""
    segment_ids: Any
    """int32: 1, 2, ... for the documents of the sequence, in order, then a separate number for each token of padding.
    With packed attention "sequence", all documents are 1; if that packing has no padding (stream), the field is None.
    """
    mask: Any
    """bool: True where the target is predicted: the target is in the same document, and the store trains on it."""
    ends: Any
    """bool: True where the target is never predicted, whatever the store's mask says: the token is the last of its
    document, or padding."""
    features: Any = None
    """Arrays [B, T, ...] by name that a model family reads beside tokens (`ringformer.models.interface.Features`)."""


def join_fields(batches: Sequence[Batch], join: Callable[[Sequence[np.ndarray]], np.ndarray]) -> Batch:
    """Return the batch whose fields `join` makes of those of all batches; fields that are None stay None."""
    fields = []
    for field in zip(*batches, strict=True):
        fields.append(None if field[0] is None else join(field))
    return Batch(*fields)


class StoreSequences(ABC):
    """Endless series of packed sequences of a store, epoch after epoch; see the subclasses.

    Attributes:
      store: the TokenStore.
      documents: int64, the numbers of its documents with lengths that the options select.
      packed_attention: "document" or "sequence", the range of a token's attention.
      position_range: tokens of the context whose positions are shown by shifts; 0: positions are not shifted.
      per_epoch: number of sequences in one pass over these documents; if passes differ, the number in the first pass.
      bytes_read: bytes of the store's tokens and mask that have been requested so far.
    """

    per_epoch: int

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        seed: int,
        options: PackingOptions = PackingOptions(),
        documents: np.ndarray | None = None,
    ):
        """Select the documents: those with lengths that the options select, or the given ones. `options.packing` is not
        used here: it has already determined the subclass."""
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} is not a length; it must be at least 1")
        check_range(options.position_range, seq_len)
        if seed < 0:
            raise ValueError(f"seed={seed} is negative; it must be at least 0")
        if not store.meta["trained_tokens"]:
            raise ValueError(f"{store.path} has no token to train on; rebuild it with masks that select the answers")
        lengths = np.diff(store.offsets)
        if (lengths <= 0).any():
            raise ValueError(f"{store.path} has documents without a token; rebuild it: each must have its end token")
        min_length = options.min_length
        max_length = options.max_length
        most = max_length or lengths.max()
        selected = (lengths >= min_length) & (lengths <= most)
        self.documents: np.ndarray = np.flatnonzero(selected) if documents is None else documents
        if not len(self.documents):
            too_long = (lengths > most).sum()
            raise ValueError(
                f"none of the {len(lengths)} documents of {store.path} has min_length={min_length} to max_length="
                f"{max_length or 'any'} tokens: {(lengths < min_length).sum()} are shorter, {too_long} longer (they "
                f"have {lengths.min()} to {lengths.max()}); widen the range"
            )
        self.store = store
        self.seq_len = seq_len
        self.packed_attention = options.packed_attention
        self.bytes_read: int = 0
        self._seed = seed
        self.position_range: int = options.position_range

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per trained token of the store."""
        return self.store.meta["utf8_bytes"] / self.store.meta["trained_tokens"]

    @property
    def tokens_per_sequence(self) -> float:
        """Mean tokens of text, not padding, in a sequence of the first epoch."""
        return float(np.diff(self.store.offsets)[self.documents].sum() / self.per_epoch)

    @property
    @abstractmethod
    def fullest(self) -> int:
        """Tokens of text, not padding, in the fullest sequence of the first epoch."""

    def read(self, index: int, positions: np.ndarray) -> Batch:
        """Read the fields [len(positions)] of sequence `index` at `positions`, which are in [0, seq_len) in any order.

        For a few runs of positions, only these tokens and the target after each run are read from the store; adjacent
        runs are read together. For many runs (a ring's striped layout), the tokens between the runs are also read.
        """
        if index < 0:
            raise ValueError(f"sequence {index} does not exist; they are counted from 0")
        if not len(positions):
            return self._stretch(index, 0, 0)
        if not 0 <= positions.min() <= positions.max() < self.seq_len:
            raise ValueError(
                f"positions {positions.min()} to {positions.max()} are not in a sequence of {self.seq_len} tokens"
            )
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        begins = positions[np.append(0, breaks)]
        ends = positions[np.append(breaks, len(positions)) - 1] + 1
        order = np.argsort(begins)
        lows = begins[order]
        highs = np.maximum.accumulate(ends[order])
        apart = (lows[1:] > highs[:-1]) & (len(begins) <= MOST_RUNS)
        lows = lows[np.append(True, apart)]
        highs = highs[np.append(apart, True)]
        stretches = [self._stretch(index, low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
        # Find the positions of each run in the concatenated stretches.
        shifts = np.cumsum(highs - lows) - highs
        places = positions + np.repeat(shifts[np.searchsorted(lows, begins, side="right") - 1], ends - begins)
        return join_fields(stretches, lambda field: np.concatenate(field)[places])

    @abstractmethod
    def _stretch(self, index: int, low: int, high: int) -> Batch:
        """Read the fields [high - low] of sequence `index` at the positions from `low` up to `high`."""

    @abstractmethod
    def documents_of(self, index: int) -> np.ndarray:
        """Return the numbers, in the store, of the documents with tokens in sequence `index`, in order, int64."""

    def _random(self, epoch: int, stream: int = 0) -> np.random.Generator:
        """Return the epoch's random generator; streams are independent."""
        bits = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
        return np.random.Generator(bits.jumped(stream))

    def _shift(
        self, positions: np.ndarray, index: int, documents: np.ndarray, lengths: np.ndarray, counts: np.ndarray
    ) -> None:
        """Shift positions of sequence `index` in place if the options have a position_range.

        Args:
          positions: int32 [n], from the start of each document.
          documents: int [k], numbers in the sequence, from 0, of the documents that the tokens belong to, in order.
          lengths: int64 [k], tokens that each document has in the sequence.
          counts: int [k], how many of them are among the n tokens.
        """
        if not self.position_range or not len(positions):
            return
        bits = np.random.Philox(key=np.array([self._seed, index], np.uint64))
        random = np.random.Generator(bits.jumped(_SHIFTS))
        drawn = draw_shifts(documents, lengths, self.position_range, random)
        behind = positions >= np.repeat(drawn.cuts, counts)
        positions += np.where(behind, np.repeat(drawn.shifts, counts), 0).astype(np.int32)

    def _text(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the tokens at the places [begins[i], ends[i]) of the store, int32, and the store's mask of these tokens,
        bool."""
        tokens = self.store.tokens
        mask = self.store.mask
        text = tokens.join(begins, ends).astype(np.int32)
        self.bytes_read += len(text) * tokens.itemsize
        if mask is None:
            return text, np.ones(len(text), bool)
        self.bytes_read += len(text) * mask.itemsize
        return text, mask.join(begins, ends) != 0
