"""Tokenizers by the name that a config gives them, and their files copied along with a model."""

from pathlib import Path

from ringformer.data.tokenizers.base import Tokenizer
from ringformer.data.tokenizers.byte_level import ByteTokenizer
from ringformer.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ringformer.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ringformer.files.atomic import write_whole
from ringformer.files.untrusted import contained


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a config names: `bytes`, a SentencePiece `.model` file, a `tokenizer.json`, or a folder.

    In a folder, `tokenizer.json` goes before `tokenizer.model`. `tokenizer_config.json` beside either gives the chat
    template, and for `tokenizer.json` the tokens that begin and end a text. Files that are not named but found may not
    be links out of their folder (`files/untrusted.py`).
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        present = [contained(path, name) for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not present:
            raise FileNotFoundError(f"the folder {spec} holds neither tokenizer.json nor tokenizer.model")
        path = present[0]
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise ValueError(
        f"unknown tokenizer {spec!r}; accepted: 'bytes', or the path of a SentencePiece file *.model, of a "
        "tokenizer.json, or of a folder with one of them"
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy a tokenizer's files to `folder`, where `load_tokenizer(folder)` finds them; bytes have none."""
    for i, file in enumerate(tokenizer.files):
        write_whole(folder / (file.name if i else f"tokenizer{file.suffix}"), file.read_bytes())
