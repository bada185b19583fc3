"""Rows of tokens with their cache: append prompts, decode tokens, append the next turns."""

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
    """Total tokens and seconds of all rows so far, excluding compilation."""

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
    """Rows and their cache, which grows in place. `Generator.session` creates one.

    Args:
      programs: of the model on its mesh. weights: the shares on the mesh.
      rows: a multiple of dp. max_length: most tokens of a row.
      prefill_chunk: tokens of a row to read at a time; None: all of them.
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
        """Tokens appended or generated so far in each row."""
        self.timings = Timings()

    @property
    def logits(self) -> jax.Array:
        """Logits of the next token of each row, float32 [rows, V], sharded over dp. The next method call deletes
        them."""
        return self._state.logits

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row: a prompt, or the next turn of a conversation.

        Raises ValueError, before anything is computed, for a row that is empty, has ids outside the vocabulary, or does
        not fit.
        """
        check_tokens(rows, self._programs.config.vocab_size)
        if len(rows) != len(self.lengths):
            raise ValueError(f"{len(rows)} rows given, but the session has {len(self.lengths)}")
        for row, (length, tokens) in enumerate(zip(self.lengths, rows, strict=True)):
            if length + len(tokens) > self._max_length:
                raise ValueError(
                    f"row {row} would have {length + len(tokens)} tokens, but max_length is {self._max_length}: append "
                    f"at most {self._max_length - length}"
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
        """Continue every row. Each step yields a list with one token of each row, None for rows that have ended.

        A row ends after an end token, which is its last token, or when `end` is called. The iterator ends when all rows
        have ended, or after max_new_tokens steps. Yielded tokens are in the cache, so the caller may stop early and
        call `append` or `decode` again.

        Raises:
          ValueError: before anything is computed: nothing to continue, no room for max_new_tokens, invalid sampling.
          FloatingPointError: at a step whose logits are not finite.
        """
        check_decoding(max_new_tokens, sampling)
        if not all(self.lengths):
            raise ValueError("there is nothing to continue: append a prompt first")
        room = self._max_length - max(self.lengths)
        if max_new_tokens > room:
            raise ValueError(
                f"{max(self.lengths)} tokens and {max_new_tokens} new ones exceed max_length="
                f"{self._max_length}: at most {room} new tokens fit"
            )
        if max_new_tokens > self._slots.free:
            raise ValueError(
                f"turns of unequal length have left room for only {self._slots.free} new tokens: decode fewer, or give "
                "each conversation a session of its own"
            )
        self._ended = set()
        return self._steps(max_new_tokens, sampling, frozenset(end_tokens))

    def end(self, row: int) -> None:
        """End this row in the running decode."""
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
                    f"the logits after the {self.lengths[bad[0]]} tokens of row {bad[0]} are not finite: the weights "
                    "are damaged, or overflow in this compute_dtype"
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
                f"{longest} tokens do not fit in the cache, where earlier turns have left room for "
                f"{room // self._programs.granule * self._programs.granule}: give each conversation a session of its "
                "own, or raise max_length"
            )

    def _append_chunk(self, rows: Sequence[Sequence[int]], firsts: np.ndarray) -> None:
        """Prefill part of the rows' tokens, which start at positions `firsts`; some rows may have none left."""
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
    """Raise ValueError for fewer than one token, or invalid sampling."""
    sampling.check()
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")


def check_room(prompt_tokens: int, max_new_tokens: int, max_length: int) -> None:
    """Raise ValueError, with the sizes that fit, if a prompt and its continuation exceed `max_length` tokens."""
    if prompt_tokens + max_new_tokens > max_length:
        room = max_length - prompt_tokens
        fits = f"at most {room:,} new tokens fit after this prompt" if room > 0 else "the prompt alone fills it"
        raise ValueError(
            f"a prompt of {prompt_tokens:,} tokens and {max_new_tokens:,} new ones exceed the limit of {max_length:,} "
            f"tokens: {fits}; {max_new_tokens:,} new ones leave room for a prompt of at most "
            f"{max(max_length - max_new_tokens, 0):,}"
        )


def check_tokens(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError for no rows, an empty row, or an id outside the vocabulary."""
    if not len(rows):
        raise ValueError("there are no prompts")
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompt {number} is empty: a prompt needs at least one token")
        if outside := [int(token) for token in row if not 0 <= token < vocab_size]:
            raise ValueError(
                f"prompt {number} has the id {outside[0]}, which is outside the vocabulary: ids lie in "
                f"[0, {vocab_size})"
            )


def _empty_state(abstract: State) -> State:
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    rest = jax.jit(lambda: tuple(jnp.zeros(x.shape, x.dtype) for x in abstract[1:]), out_shardings=tuple(shardings[1:]))
    return State(empty_cache(abstract.cache), *rest())
