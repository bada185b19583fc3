"""Session: rows of tokens with their cache. It appends prompts, decodes tokens, and appends the next turns."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringformer.inference.cache import Cache, Slots
from ringformer.inference.decode_step import NOT_FINITE
from ringformer.inference.program_sizes import ProgramSizes, round_up
from ringformer.inference.programs import CHUNK, Chunk, Programs, State, as_global
from ringformer.inference.sampling import Sampling
from ringformer.models.own_attention import REGISTERED
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
        """Speed of reading prompts; 0 if nothing was read."""
        return self.prefill_tokens / (self.prefill_seconds or 1.0)

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed of generating tokens; 0 if nothing was generated."""
        return self.decode_tokens / (self.decode_seconds or 1.0)


class Session:
    """Rows and their cache, which grows in place. `Generator.session` creates one.

    Args:
      programs: programs of the model on its mesh. weights: shares of the weights on the mesh.
      rows: number of rows, a multiple of dp. sizes: sizes of the programs, which limit the rows' lengths.
    """

    def __init__(self, programs: Programs, weights: Any, rows: int, sizes: ProgramSizes):
        dp = programs.mesh.shape["dp"]
        if rows < 1 or rows % dp:
            raise ValueError(f"{rows} rows on a mesh with dp={dp}: rows must be a multiple of dp, {dp} for example")
        self._programs, self._weights, self._sizes = programs, weights, sizes
        self._slots = Slots(sizes.ranks, sizes.capacity)
        self._state = _empty_state(programs.state(rows, sizes.capacity))
        self._alive = np.ones(rows, bool)
        self.lengths = [0] * rows
        """Number of tokens of each row, appended or generated, so far."""
        self.timings = Timings()

    @property
    def logits(self) -> jax.Array:
        """Logits of the next token of each row, float32 [rows, V], sharded over dp. The next method call deletes
        them."""
        return self._state.logits

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row: a prompt, or the next turn of a conversation.

        Before anything is computed, raises ValueError for a row that is empty, has ids outside the vocabulary, or does
        not fit.
        """
        check_tokens(rows, self._programs.config.vocab_size)
        if len(rows) != len(self.lengths):
            raise ValueError(f"{len(rows)} rows given, but the session has {len(self.lengths)}")
        longest, most, max_length = max(map(len, rows)), self._sizes.most, self._sizes.max_length
        for row, (length, tokens) in enumerate(zip(self.lengths, rows, strict=True)):
            if length + len(tokens) > max_length:
                raise ValueError(
                    f"row {row} would have {length + len(tokens)} tokens, but max_length is {max_length}: append "
                    f"at most {max_length - length}"
                )
        starts = range(0, longest, most)
        if (attention := self._programs.config.attention) in REGISTERED and (len(starts) > 1 or any(self.lengths)):
            raise ValueError(
                f"a model with attention {attention!r} reads all of its text at once: leave prefill_chunk unset, and "
                "do not add to a session"
            )
        granule, room = self._sizes.granule, self._slots.room
        if sum(round_up(min(most, longest - start), granule) for start in starts) > room:
            raise ValueError(
                f"{longest} tokens do not fit in the cache, where earlier turns have left room for "
                f"{room // granule * granule}: give each conversation a session of its own, or raise max_length"
            )
        firsts = np.array(self.lengths)
        for start in starts:
            self._append_chunk([row[start : start + most] for row in rows], firsts + start)
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, rows, strict=True)]

    def decode(
        self, *, max_new_tokens: int, sampling: Sampling = Sampling(), end_tokens: Collection[int] = ()
    ) -> Iterator[list[int | None]]:
        """Continue every row. Each step yields a list with one token for each row, or None for a row that has ended.

        A row ends after an end token, which is its last token, or when `end` is called. The iterator ends when all rows
        have ended, or after max_new_tokens steps. Yielded tokens are in the cache, so the caller may stop early and
        call `append` or `decode` again.

        Raises:
          ValueError: if there is nothing to continue, or no room for max_new_tokens; raised before anything is
            computed.
          FloatingPointError: at a step whose logits are not finite.
        """
        if not all(self.lengths):
            raise ValueError("there is nothing to continue: append a prompt first")
        check_room(max(self.lengths), max_new_tokens, self._sizes.max_length)
        if max_new_tokens > self._slots.free:
            raise ValueError(
                f"turns of unequal length have left room for only {self._slots.free} new tokens: decode fewer, or give "
                "each conversation a session of its own"
            )
        self._alive[:] = True
        return self._steps(max_new_tokens, sampling, list(end_tokens))

    def end(self, row: int) -> None:
        """End this row in the running decode."""
        self._alive[row] = False

    def _steps(self, max_new_tokens: int, sampling: Sampling, end_tokens: list[int]) -> Iterator[list[int | None]]:
        numbers = np.array([sampling.temperature, 1.0 if sampling.top_p is None else sampling.top_p], np.float32)
        top_k = min(sampling.top_k or 1, self._programs.config.vocab_size)
        for _ in range(max_new_tokens):
            alive = self._alive.copy()
            if not alive.any():
                return
            read = self._sizes.read(self._slots.top)
            control = np.array([sampling.seed, top_k, *self._slots.take(), *alive], np.int32)
            decode = self._programs.decode(len(alive), self._sizes.capacity, read, sampling.kind)
            start = time.perf_counter()
            drawn, self._state = decode(self._weights, self._state, control, numbers)
            tokens = np.asarray(drawn)
            self.timings.decode_seconds += time.perf_counter() - start
            self.timings.decode_tokens += int(alive.sum())
            if (bad := np.flatnonzero(alive & (tokens == NOT_FINITE))).size:
                raise FloatingPointError(
                    f"the logits after the {self.lengths[bad[0]]} tokens of row {bad[0]} are not finite: the weights "
                    "are damaged, or overflow in this compute_dtype"
                )
            self.lengths = (np.array(self.lengths) + alive).tolist()
            self._alive &= ~np.isin(tokens, end_tokens)
            yield [int(token) if on else None for token, on in zip(tokens, alive, strict=True)]

    def _append_chunk(self, rows: Sequence[Sequence[int]], firsts: np.ndarray) -> None:
        """Prefill part of the rows' tokens, which start at positions `firsts`; some rows may have none left."""
        programs, sizes = self._programs, self._sizes
        counts = np.array([len(row) for row in rows])
        P = sizes.chunk(int(counts.max()), self._slots.room)
        order = layouts.permutation(programs.config.layout, P, sizes.ranks // programs.config.ulysses)
        positions = np.where(order < counts[:, None], firsts[:, None] + order, -1).astype(np.int32)
        cached, travels = sizes.cached(programs.config, P, self._slots.top)
        prefill = programs.prefill(len(rows), sizes.capacity, P, cached, travels)
        slots = self._slots.take_chunk((order < counts.max()).reshape(sizes.ranks, -1))
        arrays = padded(rows, P)[:, order], positions, positions, positions.max(axis=1), slots
        chunk = Chunk(*(as_global(x, programs.mesh, spec) for x, spec in zip(arrays, CHUNK, strict=True)))
        start = time.perf_counter()
        self._state = jax.block_until_ready(prefill(self._weights, self._state, chunk))
        self.timings.prefill_seconds += time.perf_counter() - start
        self.timings.prefill_tokens += int(counts.sum())


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Return the rows as one array, int32 [rows, length], padded with zeros."""
    return np.array([[*row, *[0] * (length - len(row))] for row in rows], np.int32)


def check_room(prompt_tokens: int, max_new_tokens: int, max_length: int) -> None:
    """Raise ValueError for fewer than one new token, or if a prompt and its continuation exceed `max_length` tokens.
    The message states the sizes that fit."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if (room := max_length - prompt_tokens) < max_new_tokens:
        fits = f"at most {room:,} new tokens fit after this prompt" if room > 0 else "the prompt alone fills it"
        raise ValueError(
            f"a prompt of {prompt_tokens:,} tokens and {max_new_tokens:,} new ones exceed the limit of {max_length:,} "
            f"tokens: {fits}; {max_new_tokens:,} new ones leave room for a prompt of at most "
            f"{max(max_length - max_new_tokens, 0):,}"
        )


def check_tokens(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError if there are no rows, or if a row is empty or has an id outside the vocabulary."""
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
    """Make a state whose cache has no tokens."""
    fills = State(Cache(0, 0, -1), 0, 0)

    def make() -> State:
        return jax.tree.map(lambda x, fill: jnp.full(x.shape, fill, x.dtype), abstract, fills)

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()
