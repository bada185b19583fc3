"""Beginning of a model's texts: with the tokenizer's BOS token, or without one, as its training documents began."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.stores.beginning import bos_name
from ringformer.data.tokenizers.base import Tokenizer
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.files.run_layout import BEGINS, CONFIG
from ringformer.files.untrusted import contained_files, read_object


class Beginning(NamedTuple):
    """Beginning of the texts of a run or of a converted model."""

    folder: Path
    tokenizer: Tokenizer
    begins: bool | None
    """True if texts begin with the BOS token: those of a converted model if the tokenizer begins texts with it, those
    of a run if its documents did. None for a run on stores of an earlier version, whose texts begin without it."""

    @classmethod
    def of(cls, folder: Path, saved: Mapping[str, Any], tokenizer: Tokenizer) -> "Beginning":
        """Return the beginning that the config.json `saved` of a folder records."""
        is_run = bool(saved.get("data"))
        return cls(folder, tokenizer, saved.get(BEGINS) if is_run else tokenizer.begins)

    @property
    def tokens(self) -> list[int]:
        """The BOS token, or nothing."""
        bos = self.tokenizer.bos_id
        return [bos] if self.begins and bos is not None else []

    @property
    def in_harness(self) -> bool:
        """True if requests of lm-evaluation-harness begin with the BOS token: where a run does not record it, as those
        of its `hf` models do."""
        return self.tokenizer.begins if self.begins is None else self.begins

    def describe_earlier(self, *, harness: bool = False) -> str:
        """Return a line about the texts of a run on stores of an earlier version, if its tokenizer begins texts with a
        BOS token; empty for all others. `harness`: the texts are requests of lm-evaluation-harness."""
        if self.begins is not None or not self.tokenizer.begins:
            return ""
        token = bos_name(self.tokenizer)
        texts = f"requests begin with {token}" if harness else f"prompts and documents begin without {token}"
        why = "because an earlier version prepared its data"
        return f"{self.folder} does not record how its texts begin, {why}: {texts}, as before"

    def say_earlier(self, *, chat: bool) -> None:
        """Print the line of `describe_earlier` to stderr, but not for a chat, which begins as its template writes."""
        line = self.describe_earlier()
        if line and not chat:
            print(line, file=sys.stderr)

    def describe_export(self) -> str:
        """Return a line about an export whose tokenizer begins texts otherwise than those of the run; empty if both
        agree."""
        begins = bool(self.tokens)
        if begins == self.tokenizer.begins:
            return ""
        token = bos_name(self.tokenizer)
        ours, theirs = ("with", "without") if begins else ("without", "with")
        return (
            f"texts of {self.folder} begin {ours} {token}, but other programs begin them {theirs} it, by its tokenizer"
        )


def beginning_of(folder: Path) -> Beginning | None:
    """Return the beginning of the texts of the model in a folder; None if the folder holds no tokenizer."""
    files = contained_files(folder, ("tokenizer.json", "tokenizer.model"))
    if not files:
        return None
    return Beginning.of(folder, read_object(folder, CONFIG), load_tokenizer(str(files[0])))
