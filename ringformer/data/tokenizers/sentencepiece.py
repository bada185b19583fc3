"""Tokenizers: UTF-8 bytes, SentencePiece models such as LLaMA-2's, and `tokenizer.json` files such as LLaMA-3's.

They are lossless on the text they accept (a `tokenizer.json` where it normalizes nothing), so that a likelihood per
byte means the same whichever tokenizer a model has. A tokenizer's `name` identifies its vocabulary by content: a token
store records it, and a store made with another vocabulary is refused.

Text never becomes a control token: `</s>` in a document is four characters. Only a `Segment` of a chat template can
ask for one.
"""

import hashlib
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringformer.data.tokenizers.token_bytes import Piece, Spelling, prefixed, spell_metaspace, touched
from ringformer.untrusted_files import contained, read_object


class Segment(NamedTuple):
    """A piece of a rendered conversation: text, or one control token, and whether it is trained on."""

    text: str
    """The text; of a control token, the name to show for it."""
    trained: bool = False
    control: int | None = None
    """The id of a control token; None for text."""


class Tokenizer(Protocol):
    """Text to token ids and back; no method adds the end-of-document token `eos_id`."""

    name: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    controls: Mapping[str, int]
    """The ids of the control tokens by name."""
    config: Mapping[str, Any]
    """What `tokenizer_config.json` beside the tokenizer says; empty without one."""
    files: Sequence[Path]
    """What to copy for a model to keep its tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array per text: `encode` for bulk work."""
        ...

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each conversation, tokenized once as a whole, its ids and for each whether it is trained on.

        Text between two control tokens is encoded in one piece, whatever segments it has. A token is trained on if
        any of its characters is, so the one with an answer's first character is, whatever stands before in it.
        """
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
    bos_id = None
    controls: Mapping[str, int] = {"</s>": 256}
    config: Mapping[str, Any] = {}
    files: Sequence[Path] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts]

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self._encode_chat(chat) for chat in chats]

    def _encode_chat(self, chat: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
        pieces = [self.encode(s.text) if s.control is None else [s.control] for s in chat]
        trained = np.repeat([s.trained for s in chat], [len(piece) for piece in pieces])
        return np.array([i for piece in pieces for i in piece], np.int32), trained

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
                f"{path} has no end-of-sentence token, which must end every document; "
                "train the model with an eos_id (train_sentencepiece does)"
            )
        self.bos_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        controls = (i for i in range(self.vocab_size) if self._processor.is_control(i))
        self.controls = {self._processor.id_to_piece(i): i for i in controls}
        self._spelling = Spelling([self._spell(i) for i in range(self.vocab_size)])
        self.config, self.files = read_config(path)

    def _spell(self, i: int) -> bytes:
        return spell_metaspace(self._processor.id_to_piece(i), is_byte=self._processor.is_byte(i))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text.encode())  # as bytes: a lone surrogate is then a UnicodeEncodeError

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._processor.encode([text.encode() for text in texts], return_type="numpy")

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        # SentencePiece knows control tokens only as ids: they part the text into stretches, each encoded once. As in
        # LLaMA's own training each stretch begins anew, with the dummy prefix if the model has one.
        parted = [list(stretches(chat)) for chat in chats]
        texts = [part for chat in parted for part in chat if not isinstance(part, Segment)]
        utf8 = [b"".join(piece for piece, _ in text) for text in texts]
        encoded = self._processor.encode(utf8, return_type="numpy") if utf8 else []

        def by_offsets(i: int) -> np.ndarray:
            offsets = self._processor.encode(utf8[i], return_type="offset_mapping")["offsets"]
            return touched(*np.array(offsets, np.int64).reshape(-1, 2).T, texts[i])

        trained = self._spelling.trained(encoded, texts, lambda: [prefixed(text) for text in texts], by_offsets)
        ready = iter(zip(encoded, trained, strict=True))
        return [_join(chat, ready) for chat in parted]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


def _join(chat: list[Segment | list[Piece]], texts: Iterator[tuple[np.ndarray, np.ndarray]]):
    """Ids and what is trained on of a chat in stretches, those of text being the next of `texts`."""
    parts = [(np.zeros(0, np.int32), np.zeros(0, bool))]
    for part in chat:
        is_control = isinstance(part, Segment)
        parts.append((np.array([part.control], np.int32), np.array([part.trained])) if is_control else next(texts))
    ids, trained = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(trained)


def stretches(chat: Sequence[Segment]) -> Iterator[Segment | list[Piece]]:
    """The control tokens of a chat, and between them the pieces of text, (UTF-8, trained)."""
    text: list[Piece] = []
    for segment in chat:
        if segment.control is None:
            text.append((segment.text.encode(), segment.trained))
            continue
        if any(piece for piece, _ in text):
            yield text
        yield segment
        text = []
    if any(piece for piece, _ in text):
        yield text


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a config names: `bytes`, a SentencePiece `.model` file, a `tokenizer.json`, or a folder.

    In a folder, `tokenizer.json` goes before `tokenizer.model`. `tokenizer_config.json` beside either gives the chat
    template, and for `tokenizer.json` the tokens that begin and end a text. Files that are not named but found may not
    be links out of their folder (`untrusted_files.py`).
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        there = [contained(path, name) for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not there:
            raise FileNotFoundError(f"the folder {spec} holds neither tokenizer.json nor tokenizer.model")
        path = there[0]
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.suffix == ".json":
        from ringformer.data.tokenizers.hugging_face import HuggingFaceTokenizer  # it needs what stands here

        return HuggingFaceTokenizer(path)
    raise ValueError(
        f"unknown tokenizer {spec!r}; accepted: 'bytes', or the path of a SentencePiece file *.model, of a "
        "tokenizer.json, or of a folder with one of them"
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy a tokenizer's files to `folder`, where `load_tokenizer(folder)` finds them; bytes have none."""
    for i, file in enumerate(tokenizer.files):
        shutil.copyfile(file, folder / (file.name if i else f"tokenizer{file.suffix}"))


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


def existing_file(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}")
    return Path(path)


def read_config(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """What the files beside a tokenizer's say (a template in `chat_template.jinja` included), and all their paths."""
    settings, template = (contained(path.parent, name) for name in ("tokenizer_config.json", "chat_template.jinja"))
    config = read_object(path.parent, settings.name) if settings.is_file() else {}
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config, [path, *(file for file in (settings, template) if file.is_file())]
