"""Turn token ids into text one by one: whole characters only, and no part of a possible stop string."""

import re
from collections.abc import Sequence
from itertools import takewhile

from ringformer.data.tokenizers.base import Tokenizer

_UNFINISHED = re.compile("[\ufffd\udc80-\udcff]+\\Z")
"""Characters that tokenizers write for bytes that are not, or not yet, a character."""


class TextStream:
    """The text of ids that arrive one by one after others.

    The pieces joined, including that of `close`, are the text that `tokenizer.decode` adds to that of `before`. A space
    that SentencePiece would strip from the beginning of a text is therefore kept. A piece is returned once no later id
    can change it: characters may span several tokens, and some tokenizers revise a whole run of byte tokens when one of
    them completes no character. Ids beyond the tokenizer's vocabulary, for which a model may have rows, have no text.

    Args:
      before: the preceding ids, for example those of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context = _shortest_context(tokenizer, [i for i in before if i < tokenizer.vocab_size])
        self._begin = len(tokenizer.decode(self._context))  # where the text of _ids begins in that of _context + _ids
        self._ids: list[int] = []
        self._given = self._begin
        # A token that is not a character by itself: text that changes when it is appended is not final yet.
        self._broken = next((i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"), None)

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        if token >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token)
        ids = self._context + self._ids
        text = lasting = self._tokenizer.decode(ids)
        if self._broken is not None:
            lasting = _common_beginning(text, self._tokenizer.decode([*ids, self._broken]))
        lasting = _UNFINISHED.sub("", lasting)
        piece = lasting[self._given :]
        self._given += len(piece)
        if lasting == text:  # nothing is held back, so earlier ids are no longer needed
            self._context, self._ids = _shortest_context(self._tokenizer, ids), []
            self._given = self._begin = len(self._tokenizer.decode(self._context))
        return piece

    def close(self) -> str:
        """Return the text held back so far, including an unfinished character."""
        rest = self._tokenizer.decode(self._context + self._ids)[self._given :]
        self._given += len(rest)
        return rest


def _shortest_context(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Shortest tail of `ids` found after which decoding continues as after all of them: the full text ends with its
    text."""
    text, count = tokenizer.decode(ids), 4
    while count < len(ids):
        tail = tokenizer.decode(ids[-count:])
        if tail and text.endswith(tail):
            return ids[-count:]
        count *= 2
    return ids


def _common_beginning(a: str, b: str) -> str:
    return a[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))]


class StopStrings:
    """Text that arrives in pieces, cut before the stop string that is completed first; no part of one is returned.

    If one character completes several stop strings, the cut is before the one that begins first. The result does not
    depend on how the text is divided into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.met = False
        """True after a stop string; no more text follows."""

    def push(self, piece: str) -> str:
        """Return the text that can be released with this piece."""
        if self.met:
            return ""
        text = self._held + piece
        if ends := [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]:
            self.met, self._held = True, ""
            return text[: min(ends)[1]]
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        held = next((n for n in range(longest, 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def close(self) -> str:
        """Return the text held back because a stop string could have begun there."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


def check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a stop string that is empty, or that has characters `tokenizer` cannot spell."""
    for stop in stops:
        if not stop:
            raise ValueError("a stop string is empty: it would end every text at once")
        try:
            spelled = stop in tokenizer.decode(tokenizer.encode(f"a{stop}a"))
        except UnicodeEncodeError:
            spelled = False
        if not spelled:
            raise ValueError(
                f"the stop string {stop!r} can never occur: tokenizer {tokenizer.name} has no tokens that spell it"
            )
