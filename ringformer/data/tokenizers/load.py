"""Load a tokenizer by its name in a config, and copy its files."""

from pathlib import Path

from ringformer.data.tokenizers.base import SETTINGS, Tokenizer
from ringformer.data.tokenizers.byte_level import ByteTokenizer
from ringformer.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ringformer.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ringformer.files.atomic import write_whole
from ringformer.files.hub import TOKENIZER_FILES, local
from ringformer.files.untrusted import contained_files


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer that a config names: `bytes`, a SentencePiece `.model` file, a `tokenizer.json`, a folder, or
    a name on the hub (`files/hub.py`).

    In a folder, `tokenizer.json` takes precedence over `tokenizer.model`. A `tokenizer_config.json` beside either
    provides the chat template, and for `tokenizer.json` the tokens that begin and end a text. Files that the caller
    does not name must not be links out of their folder (`files/untrusted.py`).
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.suffix not in (".model", ".json"):
        path = local(spec, TOKENIZER_FILES)
    if path.is_dir():
        present = contained_files(path, ("tokenizer.json", "tokenizer.model"))
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
    """Copy a tokenizer's files to `folder` for `load_tokenizer(folder)`; the tokenizer `bytes` has no files.

    Files that belong to another tokenizer of the folder, and would change what this one is, are removed.
    """
    own = {file.name for file in tokenizer.files}
    for name in SETTINGS:
        if own and name not in own:
            (folder / name).unlink(missing_ok=True)
    for i, file in enumerate(tokenizer.files):
        name = file.name if i else f"tokenizer{file.suffix}"
        write_whole(folder / name, file.read_bytes())
