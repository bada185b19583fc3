"""What evaluations share: a case, what answers it, its random numbers, and how a prompt is made as long as fits."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class TextModel(Protocol):
    """What answers prompts: `ringformer.inference.text_generator.TextGenerator` does."""

    def encode(self, prompt: str, *, chat: bool = False, prefix: str = "") -> list[int]:
        """The token ids that the model is given for a prompt, and for how its answer begins; with `chat` those of its
        template around the prompt and before the answer."""
        ...

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, chat: bool = False, prefixes: Sequence[str] = ()
    ) -> list[str]:
        """The text that follows each prompt and how its answer begins, nowhere if `prefixes` is empty."""
        ...


@dataclass(frozen=True)
class Case:
    """A prompt, and what its answer should have."""

    length: int | None
    """Tokens that the prompt and `max_new_tokens` may take; None: as many as the model takes."""
    index: int
    """Of the cases that differ by their random numbers alone."""
    prompt: str
    expected: tuple[str, ...]
    max_new_tokens: int
    labels: dict[str, Any]
    """What tables and figures group by, and how the prompt was made."""
    prefix: str = ""
    """How the answer begins, which the model is given: behind the prompt, or behind the header of the assistant where
    there is a chat template."""

    @property
    def key(self) -> str:
        """What makes it this case and no other of an evaluation."""
        return json.dumps([self.length, self.index, self.labels], sort_keys=True)

    @property
    def prompt_hash(self) -> str:
        return hashlib.blake2b(
            (self.prompt + self.prefix).encode("utf-8", "surrogateescape"), digest_size=16
        ).hexdigest()


class CountTokens(Protocol):
    """The tokens of a prompt, and of how its answer begins, as the model is given them."""

    def __call__(self, prompt: str, prefix: str = "") -> int: ...


def seeded(*parts: object) -> random.Random:
    """Random numbers that are a function of `parts`, the same in every process and on every machine."""
    return random.Random(json.dumps([str(part) for part in parts]))


def largest_that_fits(tokens: Callable[[int], int], limit: int, least: int, guess: int | None = None) -> int:
    """The largest number of parts with which a prompt has at most `limit` tokens: one part more has too many.

    Args:
      tokens: the tokens of the prompt with so many parts, growing with them. Asked for few numbers of parts: a search
        from `guess`, in steps that double, then between the last two.
      least: the smallest number of parts that makes a prompt.

    Raises:
      ValueError: if `least` parts do not fit.
    """
    if (smallest := tokens(least)) > limit:
        raise ValueError(f"the shortest prompt has {smallest:,} tokens and {limit:,} fit: ask for a longer context")
    fits, beyond, step = least, None, 1
    if guess is not None and guess > least:
        if tokens(guess) <= limit:
            fits = guess
        else:
            beyond = guess
            while beyond - step > least and tokens(beyond - step) > limit:
                beyond, step = beyond - step, 2 * step
            fits = max(least, beyond - step)
    while beyond is None:
        if tokens(fits + step) <= limit:
            fits, step = fits + step, 2 * step
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
    """The tokens that a prompt may have. Raises ValueError if none are left."""
    if length <= max_new_tokens:
        raise ValueError(f"a context of {length:,} tokens has no room for a prompt before {max_new_tokens} new tokens")
    return length - max_new_tokens
