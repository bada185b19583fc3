"""Read and train SentencePiece `.model` files such as LLaMA-2's."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ringformer.data.optional_packages import needed_for
from ringformer.data.tokenizers.base import Segment, Tokenizer, existing_file, read_config, split_at_controls
from ringformer.data.tokenizers.token_bytes import (
    Piece,
    TokenBytes,
    metaspace_bytes,
    trained_tokens,
    with_dummy_prefix,
)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file.

    Lossless if the model is (byte fallback, identity normalization, no dummy prefix, as `train_sentencepiece` makes
    it), except that SentencePiece writes a space as U+2581 and cannot distinguish that character from a space.
    """

    def __init__(self, path: str | Path):
        with needed_for("a SentencePiece model"):
            from sentencepiece import SentencePieceProcessor

        path = existing_file(path)
        model = path.read_bytes()
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from None
        self.name = "sentencepiece-" + hashlib.blake2b(model, digest_size=8).hexdigest()
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError(
                f"{path} lacks the end-of-sentence token that must end every document; train the model with an eos_id "
                "(train_sentencepiece does)"
            )
        self.bos_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        controls = (i for i in range(self.vocab_size) if self._processor.is_control(i))
        self.controls = {self._processor.id_to_piece(i): i for i in controls}
        self._token_bytes = TokenBytes([self._bytes_of(i) for i in range(self.vocab_size)])
        self.config, self.files = read_config(path)
        self.begins = self.bos_id is not None and self.config.get("add_bos_token", True) is not False

    def _bytes_of(self, i: int) -> bytes:
        return metaspace_bytes(self._processor.id_to_piece(i), is_byte=self._processor.is_byte(i))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text.encode())  # encoding raises UnicodeEncodeError for a lone surrogate

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._processor.encode([text.encode() for text in texts], return_type="numpy")

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        # SentencePiece has control tokens only as ids: they separate stretches of text, each encoded once. As in
        # LLaMA's training, each stretch has the dummy prefix if the model has one.
        parted = [list(split_at_controls(chat)) for chat in chats]
        texts = [part for chat in parted for part in chat if not isinstance(part, Segment)]
        utf8 = [b"".join(piece for piece, _ in text) for text in texts]
        encoded = self._processor.encode(utf8, return_type="numpy") if utf8 else []

        def by_offsets(i: int) -> np.ndarray:
            offsets = self._processor.encode(utf8[i], return_type="offset_mapping")["offsets"]
            starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
            return trained_tokens(starts, ends, texts[i])

        trained = self._token_bytes.trained(
            encoded, texts, lambda: [with_dummy_prefix(text) for text in texts], by_offsets
        )
        ready = iter(zip(encoded, trained, strict=True))
        return [_join(chat, ready) for chat in parted]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


def _join(
    chat: list[Segment | list[Piece]], texts: Iterator[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Join the ids of a chat and the mask of ids trained on; the chat's stretches of text are the next items of
    `texts`.
    """
    parts = [(np.zeros(0, np.int32), np.zeros(0, bool))]
    for part in chat:
        if isinstance(part, Segment):
            parts.append((np.array([part.control], np.int32), np.array([part.trained])))
        else:
            parts.append(next(texts))
    ids, trained = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(trained)


def train_sentencepiece(texts: Iterable[str], path: str | Path, vocab_size: int) -> None:
    """Train a lossless BPE model with byte fallback on `texts` and write it to `path` (a `.model` file).

    It is trained line by line; a newline is one byte token, as in LLaMA's vocabulary. Ids 0, 1, 2 are unknown,
    beginning and end of sentence; 3-258 are the bytes.
    """
    with needed_for("training a tokenizer"):
        from sentencepiece import SentencePieceTrainer

    path = Path(path)
    if path.suffix != ".model":
        raise ValueError(f"{path} does not end in .model, which load_tokenizer requires for a SentencePiece file")
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
