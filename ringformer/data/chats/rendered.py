"""Conversations as chat templates render them, and checks of what the process of a template sends."""

from collections.abc import Callable, Sequence
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


def checked_segments(answer: Any, _messages: Sequence[Message], tokenizer: Tokenizer) -> list[Segment]:
    """Return the segments that the worker has sent. Raises EOFError for another value: a template may send anything."""
    segments = []
    try:
        for text, trained, control in answer:
            if (type(text), type(trained), type(control)) != (str, bool, bool):
                raise TypeError
            token = tokenizer.controls[text] if control else None
            segments.append(Segment(text, trained, token))
    except (TypeError, ValueError, KeyError) as error:
        raise EOFError from error
    return segments


def checked_sequences(answer: Any, messages: Sequence[Message], tokenizer: Tokenizer) -> list[Rendered]:
    """Return the sequences of a conversation that the worker has sent. Each has the numbers of its answers, and no
    answer is in two of them. Raises EOFError for another value, as `checked_segments` does."""
    answers = sum(message.role == "assistant" for message in messages)
    left = set(range(answers))
    sequences = []
    try:
        for sequence in answer:
            segments = checked_segments(sequence["parts"], messages, tokenizer)
            numbers = sequence["answers"]
            is_new = all(type(number) is int for number in numbers) and left.issuperset(numbers)
            if not is_new or sorted(set(numbers)) != numbers or len(numbers) != _stretches(segments):
                raise ValueError
            left.difference_update(numbers)
            sequences.append(Rendered(segments, tuple(numbers)))
    except (TypeError, ValueError, KeyError) as error:
        raise EOFError from error
    if not sequences:
        raise EOFError
    return sequences


def _stretches(segments: Sequence[Segment]) -> int:
    """Count the stretches of segments that are trained on."""
    stretches = 0
    was_trained = False
    for segment in segments:
        stretches += segment.trained and not was_trained
        was_trained = segment.trained
    return stretches
