"""Which bytes of a text its tokens stand for, from their spelling: a tokenizer takes half as long again for offsets."""

from collections.abc import Sequence

import numpy as np

Piece = tuple[bytes, bool]
"""UTF-8 of a piece of a text, and whether it is trained on."""


class Spelling:
    """The bytes of every token.

    Args:
      tokens: for each id the bytes it stands for; b"" for one that stands for none.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._tokens = tokens
        self._lengths = np.array([len(token) for token in tokens])

    def touched(self, ids: Sequence[int], pieces: Sequence[Piece]) -> np.ndarray | None:
        """`touched` for ids that spell the pieces to the byte; None if they do not."""
        if b"".join(map(self._tokens.__getitem__, ids)) != b"".join(piece for piece, _ in pieces):
            return None
        lengths = self._lengths[np.asarray(ids, np.int64)]
        ends = np.cumsum(lengths)
        return touched(np.stack([ends - lengths, ends], axis=1), pieces)


def prefixed(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces behind the space that SentencePiece models put before a text, their "dummy prefix"."""
    (first, wanted), *others = [piece for piece in pieces if piece[0]]
    return [(b" " + first, wanted), *others]


def spell_metaspace(piece: str, *, is_byte: bool) -> bytes:
    """The bytes of a piece in SentencePiece's notation: U+2581 for a space, and <0x0A> for a byte."""
    return bytes([int(piece[1:-1], 16)]) if is_byte else piece.replace("\u2581", " ").encode()


def spell_byte_level(piece: str) -> bytes | None:
    """The bytes of a piece in GPT-2's notation, a printable character for each byte; None if it is not in it."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:
        return None


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def touched(offsets: np.ndarray, pieces: Sequence[Piece]) -> np.ndarray:
    """bool [tokens]: has the token, at bytes offsets[i] = (start, end), a byte of a trained piece?

    Args:
      offsets: int64 [tokens, 2], in order.
      pieces: the text in pieces, each with whether it is trained on.
    """
    starts, ends = offsets.T.copy()
    # Some libraries call the first bytes of a character in byte tokens empty; they end where the character does.
    for i in np.flatnonzero(starts == ends)[::-1]:
        ends[i] = ends[i + 1] if i + 1 < len(ends) else ends[i]
    trained, place = np.zeros(len(starts), bool), 0
    for piece, wanted in pieces:
        if wanted and piece:
            first = np.searchsorted(ends, place, side="right")
            trained[first : np.searchsorted(starts, place + len(piece), side="left")] = True
        place += len(piece)
    return trained
