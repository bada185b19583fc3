"""Session: rows of tokens with their cache. It appends prompts, decodes tokens, and appends the next turns.

A session can forget its last tokens (`truncate`, `rewind`), and many rows can begin with the text of one (`fork`). A
long document is then read once for all questions about it.
"""

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringformer.inference.cache.chunk_attention import Reads, Travels
from ringformer.inference.cache.slots import Pieces, Slots
from ringformer.inference.decode_step import NOT_FINITE
from ringformer.inference.program_sizes import ProgramSizes, round_up
from ringformer.inference.programs import Programs
from ringformer.inference.rows import Timings, check_room, check_tokens, padded
from ringformer.inference.sampling import Sampling
from ringformer.inference.session_arrays import (
    CHUNK,
    Beginning,
    Chunk,
    Mark,
    Scores,
    State,
    as_global,
    as_globals,
    first_scores,
)
from ringformer.models.own_attention import REGISTERED
from ringformer.ops import layouts


class Session:
    """Rows and their cache, which grows in place. `Generator.session` creates one.

    Args:
      programs: programs of the model on its mesh. weights: shares of the weights on the mesh.
      rows: number of rows, a multiple of dp.
      sizes: sizes of the programs, which limit the rows' lengths beyond `begin`.
      begin: a session of one row with which all rows begin (`fork`).
    """

    def __init__(
        self, programs: Programs, weights: Any, rows: int, sizes: ProgramSizes, begin: "Session | None" = None
    ):
        dp = programs.mesh.shape["dp"]
        if rows < 1 or rows % dp:
            raise ValueError(f"{rows} rows on a mesh with dp={dp}: rows must be a multiple of dp, {dp} for example")
        self._programs, self._weights, self._sizes = programs, weights, sizes
        self._slots = Slots(rows, sizes.ranks, sizes.capacity)
        self._state = _empty_state(programs.state(rows, sizes.capacity))
        self._alive = np.ones(rows, bool)
        self._begin = begin
        self._begin_tokens: int = begin.lengths[0] if begin else 0
        self._forks: weakref.WeakSet[Session] = weakref.WeakSet()
        self.lengths: list[int] = [self._begin_tokens] * rows
        """Number of tokens of each row, appended or generated, so far."""
        self._cuts: list[list[int]] = []
        """Lengths that rows were truncated to."""
        self._followed = np.full(rows, begin is not None)
        """Rows whose logits follow their last token."""
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
        self._append(rows)

    def score(self, rows: Sequence[Sequence[int]]) -> list[Scores]:
        """Append tokens to each row, and return their scores given the tokens before them, arrays [tokens] of the host.

        Raises ValueError as `append` does, and if a row has no token before them.
        """
        self._check_followed("score")
        self._check_rows(rows)
        before = self._state.logits
        firsts = first_scores(before, np.array([row[0] for row in rows], np.int32))
        chunks = self._append(rows, scored=True)
        joined = Scores(*(np.concatenate(x, axis=1) for x in zip(firsts, *chunks, strict=True)))
        return [Scores(*(x[i, : len(row)] for x in joined)) for i, row in enumerate(rows)]

    def _append(self, rows: Sequence[Sequence[int]], scored: bool = False) -> list[Scores]:
        """Append tokens; with `scored`, return the scores of the tokens after each, in order, arrays [rows, tokens]."""
        self._check_unused()
        self._check_rows(rows)
        longest, most, max_length = max(map(len, rows)), self._sizes.most, self._sizes.max_length
        for row, (length, tokens) in enumerate(zip(self.lengths, rows, strict=True)):
            if (room := self._begin_tokens + max_length - length) < len(tokens):
                raise ValueError(
                    f"row {row} would have {length + len(tokens)} tokens, but max_length is "
                    f"{self._begin_tokens + max_length}: append at most {room}"
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
        scores = [
            self._append_chunk(
                [row[start : start + most] for row in rows],
                firsts + start,
                [row[start + 1 : start + most + 1] for row in rows] if scored else None,
            )
            for start in starts
        ]
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, rows, strict=True)]
        self._followed[:] = True
        return [chunk for chunk in scores if chunk is not None]

    def mark(self) -> Mark:
        """Return this place, for `rewind`. It keeps a copy of the logits."""
        self._check_followed("mark")
        return Mark(list(self.lengths), jnp.copy(self._state.logits), len(self._cuts))

    def rewind(self, mark: Mark) -> None:
        """Forget all tokens since `mark`. Raises ValueError if tokens before it were forgotten since then."""
        if any(
            cut < length for cuts in self._cuts[mark.cuts :] for cut, length in zip(cuts, mark.lengths, strict=True)
        ):
            raise ValueError("the session was truncated to before this mark: append the tokens again")
        self.truncate(mark.lengths)
        self._state = self._state._replace(logits=jnp.copy(mark.logits))
        self._followed[:] = True

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row from a length on; their slots are free again.

        A row that became shorter must be appended to before it is continued. Raises ValueError for a length that is
        longer than the row, or shorter than the text it was forked from.
        """
        self._check_unused()
        if len(lengths) != len(self.lengths):
            raise ValueError(f"{len(lengths)} lengths given, but the session has {len(self.lengths)} rows")
        for row, (length, now) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not self._begin_tokens <= length <= now:
                raise ValueError(
                    f"row {row} has {now} tokens: it can be truncated to {self._begin_tokens} to {now}, not {length}"
                )
        truncate = self._programs.truncate(len(lengths), self._sizes.capacity)
        wanted = as_global(np.array(lengths, np.int32), self._programs.mesh, CHUNK.last)
        self._state = truncate(self._state, wanted)
        self._slots.truncate(np.array(lengths, np.int32))
        self._followed &= np.array(lengths) == self.lengths
        self.lengths = list(lengths)
        self._cuts.append(self.lengths)

    def fork(self, rows: int, max_new: int) -> "Session":
        """Start a session of `rows` rows that begin with this one's only row, whose cache they share.

        Until that session is gone, this one cannot change.

        Args:
          max_new: most tokens of each row beyond the shared text.

        Raises ValueError for a session of several rows, without a token, or that is a fork itself, and for models with
        windows or attentions of their own.
        """
        self._check_followed("fork")
        config = self._programs.config
        if len(self.lengths) != 1 or self._begin is not None or self._programs.mesh.shape["dp"] > 1:
            raise ValueError(
                "only a session of one row, which is no fork itself and on a mesh with dp=1, can be forked"
            )
        if any(config.windows) or config.attention in REGISTERED:
            raise ValueError("models with windows, or with an attention of their own, cannot share the text of a row")
        sizes = self._programs.sizes(max_new, self._sizes.prefill_chunk)
        fork = Session(self._programs, self._weights, rows, sizes, begin=self)
        state = fork._state
        lengths = jnp.full_like(state.lengths, self.lengths[0])
        logits = jax.device_put(jnp.repeat(self._state.logits, rows, axis=0), state.logits.sharding)
        fork._state = state._replace(logits=logits, lengths=jax.device_put(lengths, state.lengths.sharding))
        self._forks.add(fork)
        return fork

    def _check_rows(self, rows: Sequence[Sequence[int]]) -> None:
        check_tokens(rows, self._programs.config.vocab_size)
        if len(rows) != len(self.lengths):
            raise ValueError(f"{len(rows)} rows given, but the session has {len(self.lengths)}")

    def _check_unused(self) -> None:
        if self._forks:
            raise ValueError("rows of another session share this one's cache: delete that session first")

    def _check_followed(self, purpose: str) -> None:
        """Raise ValueError unless the logits of every row follow its last token."""
        if not all(self.lengths):
            raise ValueError(f"there is nothing to {purpose}: append a prompt first")
        if not self._followed.all():
            raise ValueError(f"row {np.argmin(self._followed)} was truncated: append to it first, or rewind to a mark")

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
        self._check_unused()
        self._check_followed("continue")
        check_room(max(self.lengths), max_new_tokens, self._begin_tokens + self._sizes.max_length)
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
            slot = self._slots.take(np.where(alive, self.lengths, -1))
            control = np.array([sampling.seed, top_k, *slot, *alive], np.int32)
            prefix = [] if self._begin is None else [self._begin._state.cache]
            shared = 0 if self._begin is None else self._begin._sizes.capacity
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
            self._alive &= ~np.isin(tokens, end_tokens)
            yield [int(token) if on else None for token, on in zip(tokens, alive, strict=True)]

    def _append_chunk(
        self, rows: Sequence[Sequence[int]], firsts: np.ndarray, targets: Sequence[Sequence[int]] | None
    ) -> Scores | None:
        """Prefill part of the rows' tokens, which start at positions `firsts`; some rows may have none left. Return the
        scores of `targets`, the tokens after each, if there are any."""
        programs, sizes = self._programs, self._sizes
        counts = np.array([len(row) for row in rows])
        P = sizes.chunk(int(counts.max()), self._slots.room)
        order = layouts.permutation(programs.config.layout, P, sizes.ranks // programs.config.ulysses)
        positions = np.where(order < counts[:, None], firsts[:, None] + order, -1).astype(np.int32)
        reads, pieces = self._reads(P)
        begin, scored = self._begin, targets is not None
        prefix, prefix_reads, beginning = 0, None, []
        if begin is not None:
            prefix, (prefix_reads, shared) = begin._sizes.capacity, begin._reads(len(rows) * P, "queries")
            beginning = [Beginning(begin._state.cache, as_globals(shared, programs.mesh, CHUNK.pieces))]
        prefill = programs.prefill(len(rows), sizes.capacity, P, reads, prefix, prefix_reads, scored)
        slots = self._slots.take_chunk(positions.reshape(len(rows), sizes.ranks, -1))
        tokens, after = padded(rows, P)[:, order], padded(targets or [()] * len(rows), P)[:, order]
        arrays = Chunk(tokens, positions, positions, positions.max(axis=1), slots, after, pieces)
        chunk = as_globals(arrays, programs.mesh, CHUNK)
        start = time.perf_counter()
        self._state, *scores = jax.block_until_ready(prefill(self._weights, self._state, chunk, *beginning))
        self.timings.prefill_seconds += time.perf_counter() - start
        self.timings.prefill_tokens += int(counts.sum())
        natural = np.argsort(order)[: max(map(len, rows))]
        return Scores(*(np.asarray(x)[:, natural] for x in scores[0])) if scored else None

    def _reads(self, tokens: int, travels: Travels | None = None) -> tuple[Reads | None, Pieces]:
        """Return how a chunk of `tokens` reads this session's cache, and its pieces."""
        pieces = self._slots.pieces(self._sizes.piece)
        reads = self._sizes.reads(self._programs.config, tokens, self._slots.top, holes=bool(pieces.counts[1]))
        if reads is None:
            return None, pieces._replace(order=pieces.order[:0])
        return reads._replace(travels=travels or reads.travels), pieces


def _empty_state(abstract: State) -> State:
    """Make a state whose cache has no tokens."""

    def make() -> State:
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        return empty._replace(cache=empty.cache._replace(positions=empty.cache.positions - 1))

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()
