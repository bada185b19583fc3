"""A text with which many rows begin, read once: a long document, and questions about it."""

from collections.abc import Sequence

from ringformer.inference.generator import Generator
from ringformer.inference.session import Session


class SharedText:
    """Tokens that are read once, and sessions whose rows begin with them.

    Rows share one cache (`Session.fork`). If the model cannot do this (windows, dp > 1), each row of one session reads
    the tokens, and the session forgets all later tokens before it is used again (`Session.rewind`).

    Args:
      tokens: the first tokens of each row, `shared_length` of them at most.
      rows: number of rows of a session, a multiple of dp.
    """

    def __init__(self, generator: Generator, tokens: Sequence[int], rows: int):
        self._rows = rows
        self._session = generator.session(1 if generator.can_fork else rows)
        self._session.append([tokens] * len(self._session.lengths))
        self._mark = None if generator.can_fork else self._session.mark()

    def session(self, longest: int) -> Session:
        """Start a session whose rows may have `longest` tokens after the shared ones. The caller must have deleted the
        session before it."""
        if self._mark is None:
            return self._session.fork(self._rows, max_new=2 ** (longest - 1).bit_length())  # few compilations
        self._session.rewind(self._mark)
        return self._session


def shared_length(generator: Generator, tokens: int, batches: int) -> int:
    """Return how many of the first `tokens` tokens, which all rows have, are worth reading once for `batches` batches.

    A session that is used again reads only as many as need no padding of its cache: then all rows that fit into a new
    session fit into it. A model whose attention reads all text at once shares none.
    """
    if generator.can_fork:
        return tokens
    return generator.sizes.unpadded(tokens) if generator.can_append and batches > 1 else 0
