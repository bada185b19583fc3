"""Token ids become text as they come: whole characters only, nothing that a stop string may still swallow."""

import re
from collections.abc import Sequence
from itertools import takewhile

from ringformer.data.tokenizers.base import Tokenizer

_UNFINISHED = re.compile("[\ufffd\udc80-\udcff]+\\Z")
"""What tokenizers write for bytes that are no character, or not yet one."""


class TextStream:
    """The text of ids that come one by one, after others.

    Pieces joined, `close` included, are what `tokenizer.decode` adds to the text of `before` for all ids: a space that
    SentencePiece would take off the beginning of a text stays where the ids go on. A piece is given out when no later
    id can change it: characters may be spread over several tokens, and some tokenizers take back a whole run of byte
    tokens when one of them fits no character. Ids beyond the tokenizer's vocabulary, for which a model may have rows,
    have no text.

    Args:
      before: the ids that stand before, a prompt's say.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context = _shortest_context(tokenizer, [i for i in before if i < tokenizer.vocab_size])
        self._begin = len(tokenizer.decode(self._context))  # of the text of _ids in that of _context + _ids
        self._ids: list[int] = []
        self._given = self._begin
        # A token that alone is no character: whatever appending it changes is not settled yet.
        self._broken = next((i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"), None)

    def push(self, token: int) -> str:
        """The text that is whole with `token`, and was not given out yet."""
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
        if lasting == text:  # nothing is held back: what lies behind is no longer needed
            self._context, self._ids = _shortest_context(self._tokenizer, ids), []
            self._given = self._begin = len(self._tokenizer.decode(self._context))
        return piece

    def close(self) -> str:
        """What was held back, as it is: an unfinished character too."""
        rest = self._tokenizer.decode(self._context + self._ids)[self._given :]
        self._given += len(rest)
        return rest


def _shortest_context(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The last of `ids`, so many that decoding goes on after them as after all: their text ends that of all."""
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
    """Cuts text that comes in pieces before the stop string that is complete first, and gives out no part of one.

    Of those that are complete with the same character the one that begins first counts, however the pieces are cut.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.met = False
        """Whether a stop string came: nothing follows."""

    def push(self, piece: str) -> str:
        """What may be given out of the text so far, and was not yet."""
        if self.met:
            return ""
        text = self._held + piece
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            self.met, self._held = True, ""
            return text[: min(found)[1]]
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        held = next((n for n in range(longest, 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def close(self) -> str:
        """What was held back: the text ended inside of a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


def check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a stop string that no text of `tokenizer` can hold: an empty one, or one whose characters it
    cannot spell."""
    for stop in stops:
        if not stop:
            raise ValueError("a stop string is empty: every text would end before it began")
        try:
            spelled = stop in tokenizer.decode(tokenizer.encode(f"a{stop}a"))
        except UnicodeEncodeError:
            spelled = False
        if not spelled:
            raise ValueError(
                f"the stop string {stop!r} can never come: tokenizer {tokenizer.name} has no tokens that spell it"
            )
