"""Reading and training of SentencePiece `.model` files, such as LLaMA-2's."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.data.optional_packages import needed_for
from ringformer.data.tokenizers.base import Segment, Tokenizer, existing_file, read_config
from ringformer.data.tokenizers.token_bytes import (
    TokenBytes,
    join_pieces,
    metaspace_bytes,
    split_at_controls,
    trained_tokens,
)
from ringformer.files.atomic import write_whole


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file.

    The tokenizer is lossless if the model has byte fallback, identity normalization and no dummy prefix, like those of
    `train_sentencepiece`; but SentencePiece writes a space as U+2581 and cannot distinguish the two characters.
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
        self.name: str = "sentencepiece-" + hashlib.blake2b(model, digest_size=8).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.config: Mapping[str, Any]
        self.files: Sequence[Path]
        self.config, self.files = read_config(path)
        controls = {}
        tokens = []
        for i in range(self.vocab_size):
            piece = self._processor.id_to_piece(i)
            tokens.append(metaspace_bytes(piece, is_byte=self._processor.is_byte(i)))
            if self._processor.is_control(i):
                controls[piece] = i
        self.controls: Mapping[str, int] = controls
        self._token_bytes = TokenBytes(tokens)
        self.byte_lengths: np.ndarray = self._token_bytes.lengths(self.controls.values())
        self.eos_id: int = self._named("eos_token", self._processor.eos_id(), path)
        if self.eos_id < 0:
            raise ValueError(
                f"{path} lacks the end-of-sentence token that must end every document; train the model with an eos_id "
                "(train_sentencepiece does)"
            )
        if self.eos_id != self._processor.eos_id():
            self.name += f"-eos{self.eos_id}"
        bos_id = self._named("bos_token", self._processor.bos_id(), path)
        self.bos_id: int | None = bos_id if bos_id >= 0 else None
        self.begins: bool = self.bos_id is not None and self.config.get("add_bos_token", True) is not False

    def _named(self, key: str, own: int, path: Path) -> int:
        """Return the id of the control token that the files beside `path` name, and the model's `own` if they name
        none."""
        token = self.config.get(key)
        if token is None:
            return own
        if token not in tuple(self.controls):
            raise ValueError(
                f"{key} {token!r}, which a file beside {path} names, is not a control token of it: name one of "
                f"{', '.join(self.controls) or 'its tokens'} in tokenizer_config.json, or load a tokenizer.json that "
                "has the token"
            )
        return self.controls[token]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        utf8 = [text.encode() for text in texts]  # raises UnicodeEncodeError for a lone surrogate
        return self._processor.encode(utf8, return_type="numpy")

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        # SentencePiece has control tokens only as ids: they separate stretches of text, each encoded once. As in
        # LLaMA's training, each stretch has the dummy prefix if the model has one.
        texts = []
        for chat in chats:
            for part in split_at_controls(chat):
                if not isinstance(part, Segment):
                    texts.append(join_pieces(part))
        encoded = iter(self._processor.encode(texts, return_type="numpy"))
        joined = []
        for chat in chats:
            ids = [np.zeros(0, np.int32)]
            for part in split_at_controls(chat):
                ids.append(np.array([part.control], np.int32) if isinstance(part, Segment) else next(encoded))
            joined.append(np.concatenate(ids))
        return self._token_bytes.with_masks(chats, joined, self._by_offsets)

    def _by_offsets(self, chat: Sequence[Segment]) -> np.ndarray:
        masks = []
        for part in split_at_controls(chat):
            if isinstance(part, Segment):
                masks.append(np.array([part.trained]))
            else:
                offsets = self._processor.encode(join_pieces(part), return_type="offset_mapping")["offsets"]
                starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
                masks.append(trained_tokens(starts, ends, part))
        return np.concatenate(masks)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(list(map(int, ids)))


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are not empty."""
    for text in texts:
        yield from filter(None, text.split("\n"))


def train_sentencepiece(texts: Iterable[str], path: str | Path, vocab_size: int) -> None:
    """Train a lossless BPE model with byte fallback on `texts` and write it to `path` (a `.model` file).

    The model is trained line by line; a newline is one byte token, as in LLaMA's vocabulary. Ids 0, 1 and 2 are the
    tokens "unknown", "begin of sentence" and "end of sentence"; ids 3-258 are the bytes.
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
    write_whole(path, model.getvalue())
