"""Session: rows of tokens with their cache. It appends prompts, decodes tokens, and appends the next turns.

A session can forget its last tokens (`truncate`, `rewind`), many rows can begin with the text of one (`fork`), and it
can lie on disk (`save`). A long document is then read once for all questions about it.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringformer.inference.cached_rows import CachedRows
from ringformer.inference.program_sizes import round_up
from ringformer.inference.rows import check_added, check_kept, check_room, check_tokens
from ringformer.inference.sampling import Sampling
from ringformer.inference.session_arrays import CHUNK, Mark, Scores, as_global, first_scores
from ringformer.inference.session_files import save_state
from ringformer.models.own_attention import REGISTERED


class Session(CachedRows):
    """Rows of tokens. `Generator.session` and `Generator.restore_session` create a session, with the arguments of
    `CachedRows`."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._alive = np.ones(len(self.lengths), bool)
        self._forks: weakref.WeakSet[Session] = weakref.WeakSet()
        self._cuts: list[list[int]] = []
        """Lengths that rows were truncated to."""
        self._followed = np.array(self.lengths) > 0
        """Rows whose logits follow their last token."""
        self._changes = 0
        """Number of appends, truncations, forks and decodes so far. A decode ends with an error after another one."""

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
        longest = max(map(len, rows))
        most = self._sizes.most
        check_added(rows, self.lengths, self._begin_tokens + self._sizes.max_length)
        starts = range(0, longest, most)
        if (attention := self._programs.config.attention) in REGISTERED and (len(starts) > 1 or any(self.lengths)):
            raise ValueError(
                f"a model with attention {attention!r} reads all of its text at once: leave prefill_chunk unset, and "
                "do not add to a session"
            )
        granule = self._sizes.granule
        room = self._slots.room
        if sum(round_up(min(most, longest - start), granule) for start in starts) > room:
            raise ValueError(
                f"{longest} tokens do not fit in the cache, where earlier turns have left room for "
                f"{room // granule * granule}: give each conversation a session of its own, or raise max_length"
            )
        self._changes += 1
        firsts = np.array(self.lengths)
        scores = [
            self._prefill(
                [row[start : start + most] for row in rows],
                firsts + start,
                [row[start + 1 : start + most + 1] for row in rows] if scored else None,
            )
            for start in starts
        ]
        self.lengths: list[int] = [length + len(tokens) for length, tokens in zip(self.lengths, rows, strict=True)]
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
        check_kept(lengths, self.lengths, self._begin_tokens)
        self._changes += 1
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
        self._changes += 1
        return fork

    def save(self, folder: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write the session to a new folder, for `Generator.restore_session`. Only slots in use are written. The folder
        appears whole or not at all. All processes call this function.

        Args:
          about: JSON values to keep with it (`session_files.read_session`).

        Raises ValueError if there is something at `folder`, for a session that cannot be continued, that is a fork, or
        whose weights come from no checkpoint, and OSError if the disk refuses it.
        """
        self._check_followed("save")
        if self._begin is not None:
            raise ValueError("a fork has only the ends of its rows: save the session that it was forked from")
        if self._settings is None:
            raise ValueError(
                "weights without a checkpoint cannot be recognized again: use Generator.load, or pass a checkpoint"
            )
        save_state(Path(folder), self._state, self._slots, self._settings, about or {})

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
        self,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        end_tokens: Collection[int] = (),
        first_row: int = 0,
    ) -> Iterator[list[int | None]]:
        """Continue every row. Each step yields a list with one token for each row, or None for a row that has ended.

        A row ends after an end token, which is its last token, or when `end` is called. The iterator ends when all rows
        have ended, or after max_new_tokens steps. Yielded tokens are in the cache, so the caller may stop early and
        call `append` or `decode` again.

        Args:
          first_row: number of the first row among all that share a seed, so that each has draws of its own.

        Raises:
          ValueError: if there is nothing to continue, or no room for max_new_tokens; raised before anything is
            computed. Also at the next step after the session was appended to, truncated, rewound, forked, or decoded
            anew: what this iterator would go on from is gone.
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
        self._changes += 1
        return self._steps(self._changes, max_new_tokens, sampling, list(end_tokens), first_row)

    def end(self, row: int) -> None:
        """End this row in the running decode."""
        self._alive[row] = False

    def _steps(
        self, changes: int, max_new_tokens: int, sampling: Sampling, end_tokens: list[int], first_row: int
    ) -> Iterator[list[int | None]]:
        """Decode step by step; `changes` is the number of the session's changes when the decode was called."""
        for _ in range(max_new_tokens):
            if self._changes != changes:
                raise ValueError("the session has changed since this decode began: call decode again")
            alive = self._alive.copy()
            if not alive.any():
                return
            tokens = self._decode(alive, sampling, first_row)
            self._alive &= ~np.isin(tokens, end_tokens)
            yield [int(token) if on else None for token, on in zip(tokens, alive, strict=True)]
