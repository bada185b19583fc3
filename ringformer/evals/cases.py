"""Shared parts of evaluations: cases, seeded random numbers, and the search for the size of a prompt."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringformer.data.chats.conversations import Message
from ringformer.files.hashes import content_hash

PromptText = str | tuple[Message, ...]
"""A text to continue or a question, or a conversation up to the answer, for a chat template."""


@dataclass(frozen=True)
class Case:
    """A prompt and its expected answer."""

    length: int | None
    """Most tokens of the prompt and `max_new_tokens` together; None: the model's limit."""
    index: int
    """Number of the case among the cases that differ from it only by their random numbers."""
    prompt: PromptText
    expected: tuple[str, ...]
    max_new_tokens: int
    labels: dict[str, Any]
    """Parameters of the prompt, by which tables and figures group cases."""
    prefix: str = ""
    """Beginning of the answer, given to the model after the prompt or after a chat template's assistant header."""

    @property
    def key(self) -> str:
        """Identifier of the case within an evaluation."""
        return json.dumps([self.length, self.index, self.labels], sort_keys=True)

    @property
    def prompt_hash(self) -> str:
        written = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt)
        return content_hash((written + self.prefix).encode("utf-8", "surrogateescape"))


class Tokens(Protocol):
    """Tokens of a text, without those that a model's texts begin with, and the text of tokens."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


CountTokens = Callable[..., int]
"""Function that counts the tokens that the model is given for a prompt. An optional second argument is the beginning of
the answer, which is counted too."""


def seeded(*parts: object) -> random.Random:
    """Return a random generator seeded by `parts`, the same in every process and on every machine."""
    return random.Random(json.dumps(list(map(str, parts))))


def largest_that_fits(tokens: Callable[[int], int], limit: int, least: int, guess: int | None = None) -> int:
    """Find the largest number of parts with which a prompt has at most `limit` tokens.

    Args:
      tokens: number of tokens of the prompt, an increasing function of the number of parts. It is called rarely: the
        search starts at `guess`, doubles its step until it has bounds, and then bisects.
      least: the smallest number of parts that makes a prompt.

    Raises:
      ValueError: if `least` parts do not fit.
    """
    if (smallest := tokens(least)) > limit:
        raise ValueError(f"the shortest prompt has {smallest:,} tokens, but {limit:,} fit: ask for a longer context")
    fits = max(least, guess or least)
    beyond = None
    step = 1
    while fits > least and tokens(fits) > limit:
        fits, beyond, step = max(least, fits - step), fits, 2 * step
    while beyond is None:
        if tokens(fits + step) <= limit:
            fits = fits + step
            step = 2 * step
        else:
            beyond = fits + step
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if tokens(middle) <= limit:
            fits = middle
        else:
            beyond = middle
    return fits


def room_for_prompt(length: int, max_new_tokens: int) -> int:
    """Return the tokens left for a prompt. Raises ValueError if there are none."""
    if length <= max_new_tokens:
        raise ValueError(f"a context of {length:,} tokens has no room for a prompt before {max_new_tokens} new tokens")
    return length - max_new_tokens
