"""Tokenizers: UTF-8 bytes, and SentencePiece models such as LLaMA's.

Both are lossless on the text they accept, so that a likelihood per byte means the same whichever tokenizer a
model has. A tokenizer's `name` identifies its vocabulary by content: a token store records it, and a store made
with another vocabulary is refused.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back; no method adds the end-of-document token `eos_id`."""

    name: str
    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array per text: `encode` for bulk work."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens such as `eos_id` stand for no text."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are tokens 0-255, and 256 ends a document.

    Bytes that are not UTF-8 pass through as Python's `surrogateescape` characters: `decode` never fails on the
    bytes that a model made up, and `encode` gives the same bytes back.
    """

    name = "bytes"
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        ids = np.fromiter(ids, np.int64)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {self.vocab_size} tokens")
        return ids[ids != self.eos_id].astype(np.uint8).tobytes().decode("utf-8", "surrogateescape")


class SentencePieceTokenizer:
    """A SentencePiece `.model` file.

    Lossless where the model is (byte fallback, identity normalization, no dummy prefix: what `train_sentencepiece`
    makes), except that SentencePiece writes a space as U+2581 and cannot tell that character from a space.
    """

    def __init__(self, path: str | Path):
        from sentencepiece import SentencePieceProcessor

        model = _existing_file(path).read_bytes()
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from None
        self.name = "sentencepiece-" + hashlib.blake2b(model, digest_size=8).hexdigest()
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError(
                f"{path} has no end-of-sentence token, which must end every document; "
                "train the model with an eos_id (train_sentencepiece does)"
            )

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text.encode())  # as bytes: a lone surrogate is then a UnicodeEncodeError

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int32) for ids in self._processor.encode([text.encode() for text in texts])]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a config names: `bytes`, or the path of a SentencePiece `.model` file."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec.endswith(".model"):
        return SentencePieceTokenizer(spec)
    raise ValueError(f"unknown tokenizer {spec!r}; accepted: 'bytes', or the path of a SentencePiece file *.model")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer makes ids for which a model of `vocab_size` rows has none."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but the model's vocabulary only "
            f"{vocab_size}; give the model at least vocab_size={tokenizer.vocab_size}"
        )


def train_sentencepiece(texts: Iterable[str], path: str | Path, vocab_size: int) -> None:
    """Train a lossless BPE model with byte fallback on `texts` and write it to `path` (a `.model` file).

    Trained line by line; a newline itself is one byte token, as in LLaMA's vocabulary. Ids 0, 1, 2 are unknown,
    beginning and end of sentence, 3-258 the bytes.
    """
    from sentencepiece import SentencePieceTrainer

    path = Path(path)
    if path.suffix != ".model":
        raise ValueError(f"{path} does not end in .model, by which load_tokenizer knows a SentencePiece file")
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=2**24,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"SentencePiece cannot make vocab_size={vocab_size} from these texts: {error}") from None
    path.write_bytes(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    return (line for text in texts for line in text.split("\n") if line)


def _existing_file(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}")
    return Path(path)
