"""Rows of tokens that a model continues, with their cache: prompts go in, tokens come out, more may go in."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringformer.inference.cache import Slots, empty_cache
from ringformer.inference.program_sizes import ProgramSizes, round_up
from ringformer.inference.programs import CHUNK, Chunk, Programs, State, as_global
from ringformer.inference.sampling import NOT_FINITE, Sampling
from ringformer.ops import layouts


@dataclass
class Timings:
    """Tokens and seconds so far, of all rows together; compilation is not counted."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Session:
    """Rows with their cache, which grows and is never moved. `Generator.session` makes one.

    Args:
      programs: of the model on its mesh. weights: its shares, on the mesh.
      rows: a multiple of dp. max_length: tokens that a row may have.
      prefill_chunk: tokens of a row that are taken in at once; None: all of them.
    """

    def __init__(self, programs: Programs, weights: Any, rows: int, max_length: int, prefill_chunk: int | None):
        dp = programs.mesh.shape["dp"]
        if rows < 1 or rows % dp:
            raise ValueError(f"{rows} rows on a mesh with dp={dp}: rows must be a multiple of dp, {dp} for example")
        self._programs, self._weights, self._max_length = programs, weights, max_length
        self._sizes = ProgramSizes(programs.mesh.shape["sp"], programs.granule, max_length, prefill_chunk)
        self._slots = Slots(self._sizes.ranks, self._sizes.capacity)
        self._state = _empty_state(programs.state(rows, self._slots.capacity))
        self._ended: set[int] = set()
        self.lengths = [0] * rows
        """Tokens given or generated so far, of each row."""
        self.timings = Timings()

    @property
    def logits(self) -> jax.Array:
        """float32 [rows, V], sharded over dp: of the next token of each row. The next call of a method deletes it."""
        return self._state.logits

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Take in tokens after those that each row has: a prompt, or the next turn of a conversation.

        Raises ValueError, before anything is computed: a row without tokens, with ids outside the vocabulary, or longer
        than fits.
        """
        check_tokens(rows, self._programs.config.vocab_size)
        if len(rows) != len(self.lengths):
            raise ValueError(f"{len(rows)} rows were given to a session of {len(self.lengths)}")
        for row, (length, tokens) in enumerate(zip(self.lengths, rows, strict=True)):
            if length + len(tokens) > self._max_length:
                raise ValueError(
                    f"row {row} would have {length + len(tokens)} tokens, max_length is {self._max_length}: at most "
                    f"{self._max_length - length} fit"
                )
        longest = max(map(len, rows))
        self._check_room(longest)
        firsts = np.asarray(self.lengths)
        for start in range(0, longest, self._sizes.most):
            self._append_chunk([row[start : start + self._sizes.most] for row in rows], firsts + start)
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, rows, strict=True)]

    def decode(
        self, *, max_new_tokens: int, sampling: Sampling = Sampling(), end_tokens: Collection[int] = ()
    ) -> Iterator[list[int | None]]:
        """Continue every row: a list of one token of each row a step, None of rows that ended.

        A row ends after an end token, which is its last, or by `end`; the iterator when all did, or after
        max_new_tokens steps. What was yielded is in the cache, so the caller may stop early, and `append` or `decode`
        again.

        Raises:
          ValueError: before anything is computed: nothing to continue, no room for so many, odd sampling.
          FloatingPointError: at a step before which the logits are not finite.
        """
        check_decoding(max_new_tokens, sampling)
        if not all(self.lengths):
            raise ValueError("there is nothing to continue: append a prompt first")
        room = self._max_length - max(self.lengths)
        if max_new_tokens > room:
            raise ValueError(
                f"{max(self.lengths)} tokens and {max_new_tokens} new ones exceed max_length="
                f"{self._max_length}: at most {room} new ones fit"
            )
        if max_new_tokens > self._slots.free:
            raise ValueError(
                f"turns of unequal length have left room for {self._slots.free} new tokens: decode fewer, or give each "
                "conversation a session of its own"
            )
        self._ended = set()
        return self._steps(max_new_tokens, sampling, frozenset(end_tokens))

    def end(self, row: int) -> None:
        """No more tokens for this row in the running decode."""
        self._ended.add(row)

    def _steps(self, max_new_tokens, sampling, end_tokens):
        numbers = np.array([sampling.temperature, 1.0 if sampling.top_p is None else sampling.top_p], np.float32)
        rows, vocabulary = len(self.lengths), self._programs.config.vocab_size
        for _ in range(max_new_tokens):
            alive = np.array([row not in self._ended for row in range(rows)])
            if not alive.any():
                return
            read = self._sizes.read(self._slots.top)
            rank, slot = self._slots.take()
            control = np.array([sampling.seed, min(sampling.top_k or 1, vocabulary), rank, slot, *alive], np.int32)
            decode = self._programs.decode(rows, self._slots.capacity, read, sampling.kind)
            start = time.perf_counter()
            tokens, self._state = decode(self._weights, self._state, control, numbers)
            tokens = np.asarray(tokens).tolist()
            self.timings.decode_seconds += time.perf_counter() - start
            self.timings.decode_tokens += int(alive.sum())
            if bad := [row for row in np.flatnonzero(alive) if tokens[row] == NOT_FINITE]:
                raise FloatingPointError(
                    f"what should follow the {self.lengths[bad[0]]} tokens of row {bad[0]} are no finite logits: the "
                    "weights are damaged, or overflow in this compute_dtype"
                )
            self.lengths = [length + bool(on) for length, on in zip(self.lengths, alive, strict=True)]
            self._ended |= {row for row in range(rows) if tokens[row] in end_tokens}
            yield [token if on else None for token, on in zip(tokens, alive, strict=True)]

    def _check_room(self, longest: int) -> None:
        chunks = [min(self._sizes.most, longest - start) for start in range(0, longest, self._sizes.most)]
        needed = sum(round_up(tokens, self._programs.granule) for tokens in chunks)
        room = self._slots.room
        if needed > room:
            raise ValueError(
                f"{longest} tokens do not fit the cache, where earlier turns have left room for "
                f"{room // self._programs.granule * self._programs.granule}: give each conversation a session of its "
                "own, or a larger max_length"
            )

    def _append_chunk(self, rows: Sequence[Sequence[int]], firsts: np.ndarray) -> None:
        """Take in a part of the rows' tokens, of which the first stand at `firsts`; some rows may have none left."""
        programs, mesh = self._programs, self._programs.mesh
        counts = np.array([len(row) for row in rows])
        P = self._sizes.chunk(int(counts.max()), self._slots.room)
        columns = np.arange(P)
        tokens = np.zeros((len(rows), P), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        mine = columns < counts[:, None]
        positions = np.where(mine, firsts[:, None] + columns, -1).astype(np.int32)
        final = np.where(counts > 0, firsts + counts - 1, -1).astype(np.int32)
        order = layouts.permutation(programs.config.layout, P, self._sizes.ranks)
        T = P // self._sizes.ranks

        cached, travels = self._sizes.cached(programs.config, P, self._slots.top)
        prefill = programs.prefill(len(rows), self._slots.capacity, P, cached, travels)
        slots = self._slots.take_chunk((order < counts.max()).reshape(self._sizes.ranks, T))
        positions = positions[:, order]
        arrays = tokens[:, order], positions, positions, final, slots
        chunk = Chunk(*(as_global(x, mesh, spec) for x, spec in zip(arrays, CHUNK, strict=True)))
        start = time.perf_counter()
        self._state = jax.block_until_ready(prefill(self._weights, self._state, chunk))
        self.timings.prefill_seconds += time.perf_counter() - start
        self.timings.prefill_tokens += int(counts.sum())


def check_decoding(max_new_tokens: int, sampling: Sampling) -> None:
    """Raise ValueError for no tokens, or a sampling that cannot be."""
    sampling.check()
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")


def check_tokens(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError for no rows, one without tokens, or an id outside the vocabulary."""
    if not len(rows):
        raise ValueError("there are no prompts")
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompt {number} is empty: a prompt needs at least one token")
        if outside := [int(token) for token in row if not 0 <= token < vocab_size]:
            raise ValueError(
                f"prompt {number} has the id {outside[0]}, which is outside of the vocabulary: ids lie in "
                f"[0, {vocab_size})"
            )


def _empty_state(abstract: State) -> State:
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    rest = jax.jit(lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in abstract[1:]), out_shardings=tuple(shardings[1:]))
    return State(empty_cache(abstract.cache), *rest())
