"""Conversations as chat templates render them, and checks of what the process of a template sends."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ringformer.data.chats.conversations import Message
from ringformer.data.tokenizers.base import Segment, Tokenizer


class Rendered(NamedTuple):
    """A sequence that trains on answers of a conversation."""

    segments: list[Segment]
    answers: tuple[int, ...]
    """Numbers of the answers that are marked in the segments, in the order of the conversation, from 0."""


RenderAll = Callable[[Sequence[Sequence[Message]]], list[list[Rendered] | ValueError]]
"""Function that returns, for each of several conversations, the sequences that train on its answers, or an error."""


def checked_segments(answer: Any, tokenizer: Tokenizer) -> list[Segment]:
    """Return the segments that the worker has sent. Raises EOFError for another value: a template may send anything."""
    segments = []
    try:
        for text, trained, control in answer:
            if (type(text), type(trained), type(control)) != (str, bool, bool):
                raise TypeError
            segments.append(Segment(text, trained, tokenizer.controls[text] if control else None))
    except (TypeError, ValueError, KeyError) as error:
        raise EOFError from error
    return segments


def checked_sequences(answer: Any, tokenizer: Tokenizer) -> list[Rendered]:
    """Return the sequences that the worker has sent. Raises EOFError for another value, as `checked_segments` does."""
    sequences = []
    try:
        for sequence in answer:
            segments = checked_segments(sequence["parts"], tokenizer)
            numbers = sequence["answers"]
            if any(type(number) is not int for number in numbers) or sorted(set(numbers)) != numbers:
                raise TypeError
            begins = sum(after and not before for before, after in pairwise([False, *(s.trained for s in segments)]))
            if begins != len(numbers):
                raise ValueError
            sequences.append(Rendered(segments, tuple(numbers)))
    except (TypeError, ValueError, KeyError) as error:
        raise EOFError from error
    if not sequences:
        raise EOFError
    return sequences
