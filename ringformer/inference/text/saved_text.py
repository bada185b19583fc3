"""A text on disk with the session that has read it: `ringformer generate --save_session` and `--session`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.files.hashes import hash_object
from ringformer.inference.session_files import read_session
from ringformer.inference.text.answers import Answer
from ringformer.inference.text.text_generator import TextGenerator
from ringformer.inference.text.text_session import TextSession


class SavedText(NamedTuple):
    """A text and the folder of its session."""

    folder: Path
    text: str
    ids: list[int]
    """Tokens of the text, as a prompt."""
    settings: dict[str, Any]
    """Settings of the model that has read it (`session_files.settings_of`)."""

    @classmethod
    def read(cls, folder: Path, encode: Callable[[str], list[int]]) -> "SavedText":
        """Read the text of a saved session.

        Args:
          encode: returns the tokens of a text as a prompt.

        Raises ValueError if these are not the tokens in the session, or if it was saved without its text, and as
        `read_session`.
        """
        described = read_session(folder)
        about = described["about"]
        if "text" not in about:
            raise ValueError(f"{folder} has tokens without their text: restore it with Generator.restore_session")
        ids = encode(about["text"])
        if _hash(ids) != about["tokens"]:
            raise ValueError(
                f"the text of the session in {folder} has other tokens here: pass the same --chat, --system, "
                "--template and --tokenizer as when it was saved"
            )
        return cls(folder, about["text"], ids, described["session"])

    def session(self, model: TextGenerator) -> TextSession:
        """Return the session on the model's mesh. Raises as `Generator.restore_session` does."""
        restored = model.generator.restore_session(self.folder)
        return TextSession(model.generator, model.tokenizer, restored, self.ids)


def save_text(folder: Path, text: str, answer: Answer) -> None:
    """Save the session of an answer of which no token has been generated yet, with the text of its prompt. Raises as
    `Session.save` does."""
    answer.session.save(folder, {"text": text, "tokens": _hash(answer.prompt.ids)})


def _hash(ids: Sequence[int]) -> str:
    return hash_object({"ids": list(ids)})
