"""Encode long texts with the `tokenizers` library in bounded memory: as windows that are joined where they agree.

The library takes about two hundred bytes per input byte: positions of every byte in every stage, and a string for every
token. A long text is therefore encoded in overlapping windows. Near the ends of a window, tokens may differ from those
of the whole text, because the text beyond is missing. Two windows are joined in the middle of their overlap, at a
border. They are joined only if they have the same tokens at the same places for `MARGIN / 2` characters on both sides
of the border: then the text beyond the windows made no difference. If the windows differ (for example in a run of
spaces longer than the overlap), the earlier window is encoded again at twice its length, if necessary up to the end of
the text.

A Unigram model compares sums of float scores over a word (of the pre-tokenizer); the rounding of these sums depends on
the preceding text. Windows of such a model are joined between words, so that every word is encoded whole.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

WINDOW = 2**17
MARGIN = 2**13
"""Characters of a window, and of the overlap beyond each of its borders."""
AT_ONCE = 4
"""Number of windows to encode in parallel."""


class Tokens(NamedTuple):
    """The tokens of a text, each with its characters [start, end)."""

    ids: np.ndarray
    """int32 [tokens]"""
    starts: np.ndarray
    """int64 [tokens]"""
    ends: np.ndarray
    """int64 [tokens]"""
    words: np.ndarray
    """int64 [tokens]: index of the pre-tokenizer's word."""

    def at(self, index: slice | np.ndarray) -> "Tokens":
        return Tokens(self.ids[index], self.starts[index], self.ends[index], self.words[index])


class _Window(NamedTuple):
    first: int
    last: int
    tokens: Tokens


class _Joint(NamedTuple):
    """Numbers of the token at which the left window is left for the right one, in each of them."""

    left: int
    right: int


def encode_long(
    encode_batch: Callable[[list[str]], Sequence[Any]],
    text: str,
    part: Callable[[Tokens], np.ndarray],
    *,
    whole_words: bool,
) -> np.ndarray:
    """Return `part` of the tokens of `text`, the same as if it were encoded in one piece.

    Args:
      encode_batch: returns for each text an `Encoding` with offsets in characters.
      part: selects the data of tokens to keep, [tokens] or [tokens, n], to save memory.
      whole_words: join windows between words, as a Unigram model requires.
    """

    def encoded(firsts: Sequence[int], length: int) -> list[_Window]:
        """Encode windows of a length, or up to the end of the text."""
        seen = [text[max(first - MARGIN, 0) : first + length + MARGIN] for first in firsts]
        windows = []
        for first, encoding in zip(firsts, encode_batch(seen), strict=True):
            last = min(first + length, len(text))
            windows.append(_Window(first, last, _tokens(encoding, max(first - MARGIN, 0))))
        return windows

    joint = partial(_joint, text, whole_words)
    done: list[np.ndarray] = []
    (left,) = encoded([0], WINDOW)
    begin = 0  # the first token of `left` that is not done
    before: Tokens | None = None  # the previous window's
    while left.last < len(text):
        firsts = range(left.last, len(text), WINDOW)[:AT_ONCE]
        for right in encoded(firsts, WINDOW):
            at = joint(left.tokens, right.tokens, right.first)
            if at is None:
                break
            done.append(part(left.tokens.at(slice(begin, at.left))).copy())
            before = left.tokens
            left = right
            begin = at.right
        else:
            continue
        (left,) = encoded([left.first], 2 * (left.last - left.first))
        if before is not None:
            at = joint(before, left.tokens, left.first)
            if at is None:
                return part(_tokens(encode_batch([text])[0], 0))
            begin = at.right
    return np.concatenate([*done, part(left.tokens.at(slice(begin, None)))])


def _tokens(encoding: Any, begin: int) -> Tokens:
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T + begin
    words = [-1 if word is None else word for word in encoding.word_ids]
    return Tokens(np.array(encoding.ids, np.int32), starts, ends, np.array(words, np.int64))


def _joint(text: str, whole_words: bool, left: Tokens, right: Tokens, border: int) -> _Joint | None:
    """Find a token near the border at which to switch from the left window to the right one.

    Return None if the windows differ within `MARGIN / 2` characters of the border, or if the text on one side of the
    border is all spaces, because a tokenizer's result for spaces depends on the text that follows them.
    """
    reach = MARGIN // 2
    if text[border - reach : border].isspace() or text[border : border + reach].isspace():
        return None
    near_left = np.flatnonzero((left.starts >= border - reach) & (left.ends <= border + reach))
    near_right = np.flatnonzero((right.starts >= border - reach) & (right.ends <= border + reach))
    a = left.at(near_left)
    b = right.at(near_right)
    begins_word = np.diff(a.words) != 0
    same = all(map(np.array_equal, a[:3], b[:3])) and np.array_equal(begins_word, np.diff(b.words) != 0)
    if not same or (np.diff(a.starts) < 0).any():
        return None
    is_place = begins_word if whole_words else a.starts[1:] >= border
    places = np.flatnonzero(is_place) + 1
    if not len(places):
        return None
    middle = len(places) // 2
    place = places[middle if whole_words else 0]
    return _Joint(int(near_left[place]), int(near_right[place]))
