"""Rows of tokens with their cache and their logits on the devices, and the programs that change them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int32

from ringformer.inference.cache.chunk_attention import Reads, Travels
from ringformer.inference.cache.slots import Pieces, Slots
from ringformer.inference.next_token import NOT_FINITE
from ringformer.inference.program_sizes import ProgramSizes
from ringformer.inference.programs import Programs
from ringformer.inference.rows import Timings, padded
from ringformer.inference.sampling import Sampling
from ringformer.inference.session_arrays import CHUNK, Beginning, Chunk, Scores, State, as_globals, empty_state
from ringformer.ops import layouts


class CachedRows:
    """Rows and their cache, which grows in place. The methods check nothing; those of `Session` do.

    Args:
      programs: programs of the model on its mesh. weights: shares of the weights on the mesh.
      rows: number of rows, a multiple of dp.
      sizes: sizes of the programs, which limit the rows' lengths beyond `begin`.
      settings: settings by which a saved session recognizes its model (`session_files`); None: it cannot be saved.
      begin: one row with which all rows begin.
      saved: arrays and slots of so many rows; None: the rows are empty.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Any,
        rows: int,
        sizes: ProgramSizes,
        settings: Mapping[str, Any] | None = None,
        *,
        begin: "CachedRows | None" = None,
        saved: tuple[State, Slots] | None = None,
    ):
        dp = programs.mesh.shape["dp"]
        if rows < 1 or rows % dp:
            raise ValueError(f"{rows} rows on a mesh with dp={dp}: rows must be a multiple of dp, {dp} for example")
        self._programs = programs
        self._weights = weights
        self._sizes = sizes
        self._settings = settings
        if saved is None:
            saved = empty_state(programs.state(rows, sizes.capacity)), Slots(rows, sizes.ranks, sizes.capacity)
        self._state, self._slots = saved
        self._begin = begin
        self._begin_tokens: int = begin.lengths[0] if begin else 0
        self.lengths: list[int] = (self._begin_tokens + self._slots.lengths).tolist()
        """Number of tokens of each row, appended or generated, so far."""
        self.timings: Timings = Timings()

    def _prefill(
        self, rows: Sequence[Sequence[int]], firsts: np.ndarray, targets: Sequence[Sequence[int]] | None
    ) -> Scores | None:
        """Prefill part of the rows' tokens, which start at positions `firsts`; some rows may have none left. Return the
        scores of `targets`, the tokens after each, if there are any."""
        programs = self._programs
        sizes = self._sizes
        counts = np.array([len(row) for row in rows])
        P = sizes.chunk(int(counts.max()), self._slots.room)
        order = layouts.permutation(programs.config.layout, P, sizes.ranks // programs.config.ulysses)
        positions = np.where(order < counts[:, None], firsts[:, None] + order, -1).astype(np.int32)
        reads, pieces = self._reads(P)
        begin = self._begin
        scored = targets is not None
        prefix = 0
        prefix_reads = None
        beginning = []
        if begin is not None:
            prefix = begin._sizes.capacity
            prefix_reads, shared = begin._reads(len(rows) * P, "queries")
            beginning = [Beginning(begin._state.cache, as_globals(shared, programs.mesh, CHUNK.pieces))]
        prefill = programs.prefill(len(rows), sizes.capacity, P, reads, prefix, prefix_reads, scored)
        slots = self._slots.take_chunk(positions.reshape(len(rows), sizes.ranks, -1))
        tokens = padded(rows, P)[:, order]
        after = padded(targets or [()] * len(rows), P)[:, order]
        arrays = Chunk(tokens, positions, positions, positions.max(axis=1), slots, after, pieces)
        chunk = as_globals(arrays, programs.mesh, CHUNK)
        start = time.perf_counter()
        self._state, *scores = jax.block_until_ready(prefill(self._weights, self._state, chunk, *beginning))
        self.timings.prefill_seconds += time.perf_counter() - start
        self.timings.prefill_tokens += int(counts.sum())
        natural = np.argsort(order)[: max(map(len, rows))]
        if not scored:
            return None
        return Scores(*(np.asarray(x)[:, natural] for x in scores[0]))

    def _decode(self, alive: Bool[np.ndarray, " B"], sampling: Sampling, first_row: int = 0) -> Int32[np.ndarray, " B"]:
        """Draw a token of each row and append it to those that are alive; return the tokens. The draws are those of the
        rows from `first_row` on. Raises FloatingPointError for logits that are not finite."""
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        numbers = np.array([sampling.temperature, top_p], np.float32)
        top_k = min(sampling.top_k or 1, self._programs.config.vocab_size)
        read = self._sizes.read(self._slots.top)
        slot = self._slots.take(np.where(alive, self.lengths, -1))
        control = np.array([sampling.seed, top_k, *slot, first_row, *alive], np.int32)
        prefix = []
        shared = 0
        if self._begin is not None:
            prefix = [self._begin._state.cache]
            shared = self._begin._sizes.capacity
        decode = self._programs.decode(len(alive), self._sizes.capacity, read, sampling.kind, shared)
        start = time.perf_counter()
        drawn, self._state = decode(self._weights, self._state, control, numbers, *prefix)
        tokens = np.asarray(drawn)
        self.timings.decode_seconds += time.perf_counter() - start
        self.timings.decode_tokens += int(alive.sum())
        if (bad := np.flatnonzero(alive & (tokens == NOT_FINITE))).size:
            raise FloatingPointError(
                f"the logits after the {self.lengths[bad[0]]} tokens of row {bad[0]} are not finite: the weights "
                "are damaged, or overflow in this compute_dtype"
            )
        self.lengths = (np.array(self.lengths) + alive).tolist()
        return tokens

    def _reads(self, tokens: int, travels: Travels | None = None) -> tuple[Reads | None, Pieces]:
        """Return how a chunk of `tokens` reads this session's cache, and its pieces."""
        pieces = self._slots.pieces(self._sizes.piece)
        reads = self._sizes.reads(self._programs.config, tokens, self._slots.top, holes=bool(pieces.counts[1]))
        if reads is None:
            return None, pieces._replace(order=pieces.order[:0])
        return reads._replace(travels=travels or reads.travels), pieces
