"""Ends of answers in a rendered conversation: training covers an answer up to the token that ends its turn."""

from collections.abc import Sequence

import numpy as np

from ringformer.data.chats.conversations import Message
from ringformer.data.tokenizers.base import Segment


def with_end_tokens(segments: list[Segment], messages: Sequence[Message]) -> list[Segment]:
    """Mark every answer as trained on, up to and including the control token that ends the answer.

    Raises ValueError if the template does not show each answer, or ends one without that token.
    """
    flags = [False, *(segment.trained for segment in segments), False]
    runs = np.flatnonzero(np.diff(flags)).reshape(-1, 2).tolist()
    answers = sum(message.role == "assistant" for message in messages)
    if len(runs) != answers or not runs:
        raise ValueError(f"shows {len(runs)} of {answers} answers")
    first, last = runs[-1]
    # The last answer shows which token ends a turn, because nothing else can follow it.
    inside = [s for s in segments[first:last] if s.control is not None]
    end = inside[-1] if inside else next(iter(segments[last:]), None)
    if end is None or end.control is None:
        raise ValueError("ends the last answer with no control token")
    for first, last in runs:
        places = [i for i in range(first, last) if segments[i].control == end.control]
        if not places and last < len(segments) and segments[last].control == end.control:
            places = [last]
        if not places:
            raise ValueError(f"does not end an answer with {end.text}, as it ends the last one")
        for i in range(first, max(last, places[-1] + 1)):
            segments[i] = segments[i]._replace(trained=i <= places[-1])
    return segments
