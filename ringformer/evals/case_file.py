"""The file of an evaluation's cases: a JSON object a line, written as each is done, and read again to go on.

The first line says what was evaluated with which settings. A file of other ones is never added to.
"""

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class CaseFile:
    """The cases that are done, by their keys.

    Args:
      path: of the file; its folder is made.
      evaluation: lines, needle, ruler or perplexity.
      settings: what decides an outcome, besides the case itself.

    Raises:
      ValueError: if the file holds another evaluation, other settings, or what is no case. A last line that was cut
        off is none: the evaluation was killed while it wrote.
    """

    def __init__(self, path: Path, evaluation: str, settings: dict[str, Any]):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.loads(json.dumps({"evaluation": evaluation, "settings": settings}))
        self.rows: dict[str, Row] = {}
        lines = path.read_bytes().decode("utf-8", "replace").split("\n") if path.exists() else []
        kept = lines[:-1]  # what follows the last line's end was cut off, or is nothing
        if not kept and lines and not '{"evaluation": '.startswith(lines[0][:15]):  # no first line that was cut off
            raise ValueError(f"{path} is no file of an evaluation: choose another --out")
        if kept:
            self._check_head(kept[0], head, cases=len(kept) > 1)
        for number, line in enumerate(kept[1:], 2):
            row = self._row(number, line)
            self.rows[row["key"]] = row
        part = path.with_suffix(".part")  # a crash here leaves the old file
        part.write_text("".join(json.dumps(row) + "\n" for row in (head, *self.rows.values())), encoding="utf-8")
        part.replace(path)

    def _check_head(self, line: str, head: dict[str, Any], *, cases: bool) -> None:
        try:
            found = json.loads(line)
            evaluation, settings = found["evaluation"], dict(found["settings"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{self.path} is no file of an evaluation: choose another --out") from None
        if not cases:
            return
        if evaluation != head["evaluation"]:
            raise ValueError(f"{self.path} holds cases of {evaluation}, not of {head['evaluation']}: choose another "
                             "--out")  # fmt: skip
        wanted = head["settings"]
        if changed := sorted(k for k in settings.keys() | wanted.keys() if settings.get(k) != wanted.get(k)):
            said = "; ".join(f"{k} is {settings.get(k)!r}, not {wanted.get(k)!r}" for k in changed)
            raise ValueError(f"{self.path} holds cases with other settings: {said}; choose another --out")

    def _row(self, number: int, line: str) -> Row:
        try:
            row = json.loads(line)
            if not isinstance(row["key"], str) or not isinstance(row["prompt_hash"], str):
                raise TypeError
            first = next(iter(self.rows.values()), row)
            if {name: type(x) for name, x in row.items()} != {name: type(x) for name, x in first.items()}:
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{self.path}:{number} is no case: {line[:60]!r}; delete the line") from None
        return row

    def done(self, key: str, prompt_hash: str) -> bool:
        """Whether the case is in the file. Raises ValueError if it is there with another prompt."""
        row = self.rows.get(key)
        if row is not None and row["prompt_hash"] != prompt_hash:
            raise ValueError(
                f"{self.path} holds the case {key} with another prompt: the text, the tokenizer or ringformer's words "
                "have changed; choose another --out"
            )
        return row is not None

    def check(self, row: Row) -> None:
        """Raise ValueError if the file has another row of this key: somebody changed it."""
        if self.rows[row["key"]] != json.loads(json.dumps(row)):
            raise ValueError(f"{self.path}: the case {row['key']} is not as it was written: delete its line, and it is "
                             "evaluated again")  # fmt: skip

    def add(self, row: Row) -> None:
        """Write a case, on the disk when this returns; `key` and `prompt_hash` are among its fields."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["key"]] = row
