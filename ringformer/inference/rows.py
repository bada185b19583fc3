"""Rows of tokens: their checks, padding and timings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


def check_added(rows: Sequence[Sequence[int]], lengths: Sequence[int], max_length: int) -> None:
    """Raise ValueError if tokens that are added to rows of these lengths exceed `max_length`."""
    for row, (length, tokens) in enumerate(zip(lengths, rows, strict=True)):
        if (room := max_length - length) < len(tokens):
            raise ValueError(
                f"row {row} would have {length + len(tokens)} tokens, but max_length is {max_length}: append at most "
                f"{room}"
            )


def check_kept(kept: Sequence[int], lengths: Sequence[int], least: int) -> None:
    """Raise ValueError if rows of these lengths cannot be cut to `kept` tokens each, `least` at least."""
    if len(kept) != len(lengths):
        raise ValueError(f"{len(kept)} lengths given, but the session has {len(lengths)} rows")
    for row, (length, now) in enumerate(zip(kept, lengths, strict=True)):
        if not least <= length <= now:
            raise ValueError(f"row {row} has {now} tokens: it can be truncated to {least} to {now}, not {length}")


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
