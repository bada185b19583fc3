"""A session of one row that answers one prompt after another, and reads of each only what its cache does not hold."""

from collections.abc import Sequence
from typing import Any

from ringformer.data.tokenizers.base import Tokenizer
from ringformer.inference.generator import Generator
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session
from ringformer.inference.text.answers import Answer, RowText
from ringformer.inference.text.run_text import Prompt


class TextSession:
    """A session of one row, which begins with the first prompt, and the tokens in its cache.

    Args:
      session: a session to go on with; None: an empty one. ids: its tokens.
    """

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, session: Session | None = None, ids: Sequence[int] = ()
    ):
        self._generator = generator
        self._tokenizer = tokenizer
        self._session = session
        self._ids = list(ids)
        self._last: Answer | None = None

    def answer(self, prompt: Prompt, max_new_tokens: int, sampling: Sampling, stop: Sequence[str]) -> Answer:
        """Continue a prompt. The answer before ends; its tokens are kept as far as they begin the prompt.

        All of the prompt is read if nothing can be added to the cache: the model has an attention of its own, or turns
        of odd lengths have left no room in the cache. Raises ValueError as `Session.append` and `Session.decode` do.
        """
        if self._last is not None:
            self._last.close()
            self._ids = self._last.cached
        kept = shared_beginning(self._ids, prompt.ids[:-1])  # at least one token is read, for the logits after it
        if not self._ids:  # an empty session, or contents that are undefined
            self._session = self._last = None  # free before there is another
            self._session = self._generator.session(1)
        session = self._session
        self._last = None
        self._ids = []  # until the prompt is read
        assert session is not None
        try:
            steps = self._read(session, prompt, kept, max_new_tokens, sampling)
        except ValueError:
            if not kept:
                raise
            kept = 0
            steps = self._read(session, prompt, kept, max_new_tokens, sampling)
        self._last = Answer(session, prompt, kept, steps, RowText(self._tokenizer, prompt, stop))
        return self._last

    def _read(self, session: Session, prompt: Prompt, kept: int, max_new_tokens: int, sampling: Sampling) -> Any:
        """Read a prompt from its token `kept` on, and start to decode."""
        if session.lengths != [kept]:
            session.truncate([kept])
        session.append([prompt.ids[kept:]])
        return session.decode(max_new_tokens=max_new_tokens, sampling=sampling, end_tokens=prompt.ends)


def shared_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """Return with how many equal tokens two rows begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
