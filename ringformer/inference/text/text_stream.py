"""Conversion of token ids, one by one, to text: only whole characters, and no part of a possible stop string."""

import re
from collections.abc import Sequence
from os.path import commonprefix

from ringformer.data.tokenizers.base import Tokenizer

_UNFINISHED = re.compile("[\ufffd\udc80-\udcff]+\\Z")
"""Characters that tokenizers write for bytes that are not a character, or not yet."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class TextStream:
    """Text of ids that arrive one by one after the ids `before`.

    The joined pieces, including the piece from `close`, are the text that `tokenizer.decode` adds to the text of
    `before`. A space that SentencePiece would strip from the beginning of a text is therefore kept. A piece is returned
    once no later id can change it. Characters may span several tokens, and some tokenizers revise a whole run of byte
    tokens when one of them completes no character. A model may have rows for ids beyond the tokenizer's vocabulary;
    these ids have no text.

    Args:
      before: the preceding ids, for example those of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._start([i for i in before if i < tokenizer.vocab_size])
        # A token that is not a character by itself. Text that changes when this token is appended is not final yet.
        self._broken = next((i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"), None)

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        if token >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token)
        text = lasting = self._tokenizer.decode(self._ids)
        if self._broken is not None:
            changed = self._tokenizer.decode([*self._ids, self._broken])
            lasting = commonprefix([text, changed])  # noqa: RUF071 - of characters
        lasting = _UNFINISHED.sub("", lasting)
        piece = lasting[self._given :]
        self._given += len(piece)
        if lasting == text:  # nothing is held back, so most earlier ids are no longer needed
            self._start(self._ids)
        return piece

    def close(self) -> str:
        """Return the text held back so far, including an unfinished character."""
        return self._tokenizer.decode(self._ids)[self._given :]

    def _start(self, ids: list[int]) -> None:
        """Keep only as many of the last `ids` as are needed to decode the ids that follow. All text of `ids` has been
        returned."""
        self._ids = _shortest_context(self._tokenizer, ids)
        self._given = len(self._tokenizer.decode(self._ids))


def _shortest_context(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return a short tail of `ids` from which decoding can continue: the text of `ids` ends with the text of the
    tail."""
    text = tokenizer.decode(ids)
    count = 4
    while count < len(ids):
        tail = tokenizer.decode(ids[-count:])
        if tail and text.endswith(tail):
            return ids[-count:]
        count *= 2
    return ids


def valid_unicode(text: str) -> str:
    """Return a text with U+FFFD in place of bytes that are not UTF-8, which the tokenizer `bytes` writes as halves of
    surrogate pairs."""
    return _SURROGATES.sub("\ufffd", text)


class StopStrings:
    """Text that arrives in pieces and is cut before the stop string that is completed first.

    No part of a stop string is returned. If one character completes several stop strings, the text is cut before the
    one that begins first. The result does not depend on how the text is divided into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.met: bool = False
        """True after a stop string; no more text follows."""

    def push(self, piece: str) -> str:
        """Return the text that this piece makes final."""
        if self.met:
            return ""
        text = self._held + piece
        if ends := [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]:
            self.met = True
            self._held = ""
            return text[: min(ends)[1]]
        starts = (i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self._stops))
        end = next(starts, len(text))
        self._held = text[end:]
        return text[:end]

    def close(self) -> str:
        """Return the text that was held back because it could have been the beginning of a stop string."""
        return self._held


def check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a stop string that is empty, or that has characters that `tokenizer` cannot spell."""
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
