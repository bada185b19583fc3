"""The tokenizer `bytes`: UTF-8 bytes are the tokens."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.data.tokenizers.base import Segment, Tokenizer


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are tokens 0-255, and 256 ends a document.

    Bytes that are not UTF-8 pass through as Python's `surrogateescape` characters: `decode` never fails on bytes that a
    model generates, and `encode` returns the same bytes.
    """

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    bos_id: int | None = None
    begins = False
    controls: Mapping[str, int] = {"</s>": 256}
    config: Mapping[str, Any] = {}
    files: Sequence[Path] = ()
    byte_lengths: np.ndarray = np.append(np.ones(256, np.int32), np.int32(0))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts]

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        encoded = []
        for chat in chats:
            ids: list[int] = []
            trained: list[bool] = []
            for segment in chat:
                piece = self.encode(segment.text) if segment.control is None else [segment.control]
                ids += piece
                trained += [segment.trained] * len(piece)
            encoded.append((np.array(ids, np.int32), np.array(trained, bool)))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        values = np.fromiter(ids, np.int64)
        outside = values[(values < 0) | (values >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {self.vocab_size} tokens")
        return values[values != self.eos_id].astype(np.uint8).tobytes().decode("utf-8", "surrogateescape")
