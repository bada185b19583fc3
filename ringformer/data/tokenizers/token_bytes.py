"""Bytes of tokens, which determine the tokens of a text that are trained on; using offsets from a tokenizer's library
would take half as long again."""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

COMPARED = 2**18
"""Tokens to compare with the text at a time; the comparison takes 24 bytes of memory for each of their bytes."""

Piece = tuple[bytes, bool]
"""UTF-8 bytes of a piece of a text, and whether it is trained on."""


class TokenBytes:
    """The bytes of every token of a vocabulary.

    Args:
      tokens: the bytes of each id; b"" for an id without text.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._bytes = np.frombuffer(b"".join(tokens), np.uint8)
        self._lengths = np.array([len(token) for token in tokens], np.int32)
        self._begins = np.cumsum(self._lengths) - self._lengths

    def trained(
        self,
        encoded: Sequence[np.ndarray],
        texts: Sequence[Sequence[Piece]],
        behind_prefix: Callable[[], Sequence[Sequence[Piece]]],
        ask_library: Callable[[int], np.ndarray],
    ) -> list[np.ndarray]:
        """Return for each text a mask, bool [tokens], of tokens with a byte of a trained piece.

        Args:
          encoded: the ids of each text.
          texts: the pieces of each text.
          behind_prefix: returns the texts with a space before each stretch where the tokenizer may add a space.
          ask_library: returns the mask of text i from the library's offsets, for ids whose bytes differ from the text:
            a normalizer changed it, or characters are unknown.
        """
        ways = [texts]
        masks = self._by_bytes(encoded, texts)
        if masks is None:
            ways.append(behind_prefix())
            masks = self._by_bytes(encoded, ways[1])
        if masks is None:  # some text needs another way: try each text separately
            masks = []
            for i, ids in enumerate(encoded):
                tried = (self._by_bytes([ids], [way[i]]) for way in ways)
                mask = next((mask for mask in tried if mask), None)
                masks += mask or [ask_library(i)]
        return masks

    def _by_bytes(self, encoded: Sequence[np.ndarray], texts: Sequence[Sequence[Piece]]) -> list[np.ndarray] | None:
        """Return `trained_tokens` of each text; None if the bytes of any text's ids differ from its pieces."""
        if not encoded:
            return []
        ids, pieces = np.concatenate(encoded), list(chain.from_iterable(texts))
        lengths = self._lengths[ids]
        borders = np.cumsum([len(each) for each in encoded])
        text_ends = np.cumsum([sum(len(piece) for piece, _ in text) for text in texts])
        size = int(lengths.sum(dtype=np.int64))
        if size != text_ends[-1]:
            return None
        ends = np.cumsum(lengths, dtype=np.int32 if size < 2**31 else np.int64)
        if not all(end == (ends[border - 1] if border else 0) for border, end in zip(borders, text_ends, strict=True)):
            return None
        starts = ends - lengths
        text = memoryview(b"".join(piece for piece, _ in pieces))
        for first in range(0, len(ids), COMPARED):
            some = slice(first, first + COMPARED)
            begin, end = int(starts[first]), int(ends[some][-1])
            places = np.repeat(self._begins[ids[some]] - starts[some], lengths[some]) + np.arange(begin, end)
            if self._bytes[places].tobytes() != text[begin:end]:
                return None
        del ids, lengths, text
        return np.split(trained_tokens(starts, ends, pieces), borders[:-1])


def trained_tokens(starts: np.ndarray, ends: np.ndarray, pieces: Sequence[Piece]) -> np.ndarray:
    """Mask the tokens, at bytes [starts[i], ends[i]) in order, with a byte of a trained piece; bool [tokens]."""
    # Some libraries report the first byte tokens of a character as empty; they end where the character does.
    ends = ends.copy()
    for i in np.flatnonzero(starts == ends)[::-1]:
        ends[i] = ends[i + 1] if i + 1 < len(ends) else ends[i]
    lengths = np.array([len(piece) for piece, _ in pieces], np.int64)
    trained = np.array([trained for _, trained in pieces], bool) & (lengths > 0)
    piece_ends = np.cumsum(lengths)
    first = np.searchsorted(ends, (piece_ends - lengths)[trained], side="right")
    last = np.searchsorted(starts, piece_ends[trained], side="left")
    # Neighbours may share a token: count the pieces that a token overlaps.
    change = np.zeros(len(starts) + 1, np.int32)
    np.add.at(change, first, 1)
    np.subtract.at(change, last, 1)
    return np.cumsum(change[:-1], out=change[:-1]) > 0


def with_dummy_prefix(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Prepend the space that SentencePiece models put before a text, their "dummy prefix"."""
    (first, trained), *others = [piece for piece in pieces if piece[0]]
    return [(b" " + first, trained), *others]


def metaspace_bytes(piece: str, *, is_byte: bool) -> bytes:
    """Decode a vocabulary's piece in SentencePiece's notation: U+2581 for a space, and <0x0A> for a byte."""
    return bytes([int(piece[1:-1], 16)]) if is_byte else piece.replace("\u2581", " ").encode()


def byte_level_bytes(piece: str) -> bytes | None:
    """Decode a vocabulary's piece in GPT-2's notation, a printable character for each byte; None if it is invalid."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:
        return None


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 characters represent themselves, other bytes map to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
