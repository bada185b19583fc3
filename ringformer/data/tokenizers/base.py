"""The tokenizer protocol, the segments of a chat template, and the files that accompany a tokenizer.

Tokenizers are lossless on the text they accept (for a `tokenizer.json`: if it does not normalize), so that a likelihood
per byte is comparable between tokenizers. A tokenizer's `name` identifies its vocabulary by content: a token store
records the name, and a store made with a different vocabulary is refused.

Text never becomes a control token: `</s>` in a document is four characters. Only a `Segment` of a chat template can
request one.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringformer.data.tokenizers.special_tokens import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, token_names
from ringformer.files.untrusted import contained_files, read_object


class Segment(NamedTuple):
    """A piece of a rendered conversation: text or one control token, which may be trained on."""

    text: str
    """Text, or the display name of a control token."""
    trained: bool = False
    control: int | None = None
    """Id of a control token; None for text."""


class Tokenizer(Protocol):
    """A map from text to token ids and back; no method adds the end-of-document token `eos_id`."""

    name: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    begins: bool
    """True if texts for its models begin with `bos_id`, as in Hugging Face; `encode` does not add it."""
    controls: Mapping[str, int]
    """Ids of the control tokens by name."""
    config: Mapping[str, Any]
    """Settings from the files beside the tokenizer (`read_config`); empty without them."""
    files: Sequence[Path]
    """Files to copy so that a model keeps its tokenizer."""
    byte_lengths: np.ndarray
    """Bytes of text of each token, int32 [vocab_size]; 0 for a control token."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts, each to an integer array."""
        ...

    def encode_chats(self, chats: Sequence[Sequence[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode each conversation as a whole; return its ids, and a mask of the ids that are trained on.

        Text between two control tokens is encoded in one piece, even if it has several segments. A token is trained on
        if any of its characters is trained on. So a token with an answer's first character is trained on even if it
        begins before the answer.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids` to text; control tokens such as `eos_id` have no text."""
        ...


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has ids beyond a model's vocabulary of `vocab_size` rows."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but the model's vocabulary has "
            f"only {vocab_size}; give the model at least vocab_size={tokenizer.vocab_size}"
        )


def control_name(tokenizer: Tokenizer, token: int | None) -> str:
    """Return the name of a control token; empty if it has none."""
    for name, i in tokenizer.controls.items():
        if i == token:
            return name
    return ""


def existing_file(path: str | Path) -> Path:
    """Return the path of a file. Raises FileNotFoundError if it does not exist."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}")
    return Path(path)


CHAT_TEMPLATE = "chat_template.jinja"
SETTINGS = TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE
"""Files beside a tokenizer that belong to it."""


def read_config(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the settings from the files beside a tokenizer, and the paths of all these files.

    The settings are those of tokenizer_config.json, with the text of chat_template.jinja, and with the name of each
    special token instead of its description (`token_names`).
    """
    folder = path.parent
    present = contained_files(folder, SETTINGS)
    config: dict[str, Any] = {}
    named: dict[str, Any] = {}
    if folder / TOKENIZER_CONFIG in present:
        config = read_object(folder, TOKENIZER_CONFIG)
    if folder / SPECIAL_TOKENS_MAP in present:
        named = read_object(folder, SPECIAL_TOKENS_MAP)
    config |= token_names(config, named)
    if folder / CHAT_TEMPLATE in present:
        config["chat_template"] = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    return config, [path, *present]
