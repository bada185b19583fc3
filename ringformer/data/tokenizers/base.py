"""The tokenizer protocol, the segments of a chat template, and the files beside a tokenizer's own.

Tokenizers are lossless on the text they accept (a `tokenizer.json` where it normalizes nothing), so that a likelihood
per byte means the same whichever tokenizer a model has. A tokenizer's `name` identifies its vocabulary by content: a
token store records it, and a store made with another vocabulary is refused.

Text never becomes a control token: `</s>` in a document is four characters. Only a `Segment` of a chat template can
ask for one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringformer.data.tokenizers.token_bytes import Piece
from ringformer.files.untrusted import contained, read_object


class Segment(NamedTuple):
    """A piece of a rendered conversation: text, or one control token, and whether it is trained on."""

    text: str
    """The text; of a control token, the name to show for it."""
    trained: bool = False
    control: int | None = None
    """The id of a control token; None for text."""


class Tokenizer(Protocol):
    """A map from text to token ids and back; no method adds the end-of-document token `eos_id`."""

    name: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    begins: bool
    """Whether a text of its models begins with `bos_id`, as in Hugging Face; `encode` adds none."""
    controls: Mapping[str, int]
    """The ids of the control tokens by name."""
    config: Mapping[str, Any]
    """The contents of the `tokenizer_config.json` beside the tokenizer; empty without one."""
    files: Sequence[Path]
    """The files to copy for a model to keep its tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array per text: `encode` for bulk work."""
        ...

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of each conversation, tokenized once as a whole, and for each id whether it is trained on.

        Text between two control tokens is encoded in one piece, whatever segments it has. A token is trained on if
        any of its characters is, so the one with an answer's first character is, whatever stands before in it.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens such as `eos_id` stand for no text."""
        ...


def split_at_controls(chat: Sequence[Segment]) -> Iterator[Segment | list[Piece]]:
    """The control tokens of a chat, and between them each stretch of text as its pieces."""
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


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer makes ids for which a model of `vocab_size` rows has none."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but the model's vocabulary only "
            f"{vocab_size}; give the model at least vocab_size={tokenizer.vocab_size}"
        )


def existing_file(path: str | Path) -> Path:
    """The path as one of a file. Raises FileNotFoundError if none is there."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}")
    return Path(path)


def read_config(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """The settings in the files beside a tokenizer's (a template in `chat_template.jinja` included), and all paths."""
    settings, template = (contained(path.parent, name) for name in ("tokenizer_config.json", "chat_template.jinja"))
    config = read_object(path.parent, settings.name) if settings.is_file() else {}
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config, [path, *(file for file in (settings, template) if file.is_file())]
