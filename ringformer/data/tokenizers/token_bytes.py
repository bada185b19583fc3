"""Masks of the tokens that are trained on, computed from the bytes of the tokens.

Computing them from the offsets of a tokenizer's library would take 50% longer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from ringformer.data.tokenizers.base import Segment

JOINED = 2**16
"""Tokens whose bytes are joined at a time; Python's join takes nearly 100 bytes of memory for each of them."""

Piece = tuple[bytes, bool]
"""UTF-8 bytes of a piece of a text, and True if the piece is trained on."""


class TokenBytes:
    """The bytes of every token of a vocabulary.

    Args:
      tokens: the bytes of each id. For a control token, they are its name in `pieces`; for an id without text, b"".
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._tokens: Any = np.array(tokens, object)
        self._lengths = np.array(list(map(len, tokens)), np.int32)

    def lengths(self, controls: Iterable[int]) -> np.ndarray:
        """Return the number of bytes of each token, 0 for `controls`, int32 [tokens]."""
        lengths = self._lengths.copy()
        lengths[list(controls)] = 0
        return lengths

    def pieces(self, chat: Sequence[Segment], prefix: bytes = b"") -> list[Piece]:
        """Return the pieces of a chat, with `prefix` before each stretch of text between control tokens."""
        pieces: list[Piece] = []
        for part in split_at_controls(chat):
            if isinstance(part, Segment):
                pieces.append((self._tokens[part.control], part.trained))
            else:
                (first, trained), *others = part
                pieces += [(prefix + first, trained), *others]
        return pieces

    def with_masks(
        self,
        chats: Sequence[Sequence[Segment]],
        encoded: Sequence[np.ndarray],
        ask_library: Callable[[Sequence[Segment]], np.ndarray],
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of each chat, and their mask from `trained`."""
        return [(ids, self.trained(chat, ids, ask_library)) for chat, ids in zip(chats, encoded, strict=True)]

    def trained(
        self, chat: Sequence[Segment], ids: np.ndarray, ask_library: Callable[[Sequence[Segment]], np.ndarray]
    ) -> np.ndarray:
        """Return the mask of the tokens `ids` of a chat that have a byte of a trained piece, bool [tokens].

        The bytes of the tokens are compared with the chat, and with the chat preceded by a space, because SentencePiece
        models put a space before a text (their "dummy prefix").

        Args:
          ask_library: returns the mask of a chat from the library's offsets. It is called if the bytes differ from the
            chat's, because a normalizer changed the text or because characters are unknown.
        """
        parts = []
        for i in range(0, len(ids), JOINED):
            parts.append(b"".join(self._tokens[ids[i : i + JOINED]]))
        text = b"".join(parts)
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths, dtype=np.int64)
        for prefix in (b"", b" "):
            pieces = self.pieces(chat, prefix)
            if join_pieces(pieces) == text:
                return trained_tokens(ends - lengths, ends, pieces)
        return ask_library(chat)


def split_at_controls(chat: Sequence[Segment]) -> Iterator[Segment | list[Piece]]:
    """Yield the control tokens of a chat, and each stretch of text between them as its pieces, none of them empty."""
    text: list[Piece] = []
    for segment in chat:
        if segment.control is None:
            if segment.text:
                text.append((segment.text.encode(), segment.trained))
            continue
        if text:
            yield text
        yield segment
        text = []
    if text:
        yield text


def join_pieces(pieces: Sequence[Piece]) -> bytes:
    """Return the text of the pieces."""
    return b"".join(piece for piece, _ in pieces)


def trained_tokens(starts: np.ndarray, ends: np.ndarray, pieces: Sequence[tuple[Sized, bool]]) -> np.ndarray:
    """Return the mask of the tokens that overlap a trained piece, bool [tokens].

    Args:
      starts, ends: the bytes or characters [starts[i], ends[i]) of each token, in order.
      pieces: the pieces of the text, as bytes or as characters, each with True if it is trained on.
    """
    # Some libraries report the first byte tokens of a character as empty; they end where the character does.
    ends = ends.copy()
    for i in np.flatnonzero(starts[:-1] == ends[:-1])[::-1]:
        ends[i] = ends[i + 1]
    lengths = np.array([len(piece) for piece, _ in pieces], np.int64)
    trained = np.array([is_trained for _, is_trained in pieces], bool) & (lengths > 0)
    piece_ends = np.cumsum(lengths)
    # Neighbours may share a token: count the pieces that a token overlaps.
    change = np.zeros(len(starts) + 1, np.int32)
    np.add.at(change, np.searchsorted(ends, (piece_ends - lengths)[trained], side="right"), 1)
    np.subtract.at(change, np.searchsorted(starts, piece_ends[trained], side="left"), 1)
    return np.cumsum(change[:-1], out=change[:-1]) > 0


def metaspace_bytes(piece: str, *, is_byte: bool) -> bytes:
    """Decode a vocabulary's piece in SentencePiece's notation: U+2581 for a space, and <0x0A> for a byte."""
    if is_byte:
        return bytes([int(piece[1:-1], 16)])
    return piece.replace("\u2581", " ").encode()


def byte_level_bytes(piece: str) -> bytes | None:
    """Decode a vocabulary's piece in GPT-2's notation, a printable character for each byte; None if it is invalid."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:
        return None


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 characters represent themselves, other bytes map to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    code = 0x100
    for byte in range(256):
        if byte not in printable:
            byte_of[chr(code)] = byte
            code += 1
    return byte_of


_BYTE_OF = _byte_characters()
