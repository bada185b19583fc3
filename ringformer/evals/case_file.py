"""The file of an evaluation's cases: a JSON object a line, written as each is done, and read again to go on.

The first line says what was evaluated with which settings. A file of other ones is never added to.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
CheckRow = Callable[[Row], None]
"""Raises ValueError, KeyError or TypeError for a row that the evaluation did not write."""


def read_cases(path: Path, evaluation: str, check: CheckRow) -> tuple[dict[str, Any] | None, dict[str, Row]]:
    """The settings of a file of cases, and its cases by their keys; (None, {}) for one that was cut off in its first
    line.

    Raises:
      ValueError: if it holds another evaluation, a case twice, or what is no case. A last line that was cut off is
        none: the evaluation was killed while it wrote.
      FileNotFoundError: if there is none.
    """
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    kept = lines[:-1]  # what follows the last line's end was cut off, or is nothing
    if not kept:
        if not '{"evaluation": '.startswith(lines[0][:15]):  # no first line that was cut off
            raise ValueError(f"{path} is no file of an evaluation: choose another --out")
        return None, {}
    try:
        head = json.loads(kept[0])
        found, settings = head["evaluation"], dict(head["settings"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no file of an evaluation: choose another --out") from None
    if kept[1:] and found != evaluation:
        raise ValueError(f"{path} holds cases of {found}, not of {evaluation}: choose another --out")
    rows: dict[str, Row] = {}
    for number, line in enumerate(kept[1:], 2):
        try:
            row = json.loads(line)
            if not isinstance(row["key"], str) or not isinstance(row["prompt_hash"], str):
                raise TypeError
            first = next(iter(rows.values()), row)
            if {name: type(x) for name, x in row.items()} != {name: type(x) for name, x in first.items()}:
                raise TypeError
            check(row)
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number} is no case: {line[:60]!r}; delete the line") from None
        if row["key"] in rows:
            raise ValueError(f"{path}:{number} is a case that stands there before: {line[:60]!r}; delete the line")
        rows[row["key"]] = row
    return settings, rows


class CaseFile:
    """The cases that are done, by their keys.

    Args:
      path: of the file; its folder is made.
      evaluation: lines, needle, ruler or perplexity.
      settings: what decides an outcome, besides the case itself.
      check: of a row that the file has.

    Raises:
      ValueError: if the file holds cases with other settings, or what `read_cases` refuses.
    """

    def __init__(self, path: Path, evaluation: str, settings: dict[str, Any], check: CheckRow):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.loads(json.dumps({"evaluation": evaluation, "settings": settings}))
        found, self.rows = read_cases(path, evaluation, check) if path.exists() else (None, {})
        if self.rows:
            self._check_settings(found or {}, head["settings"])
        part = path.with_suffix(".part")  # a crash here leaves the old file
        part.write_text("".join(json.dumps(row) + "\n" for row in (head, *self.rows.values())), encoding="utf-8")
        part.replace(path)

    def _check_settings(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        if changed := sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k)):
            said = "; ".join(f"{k} is {found.get(k)!r}, not {wanted.get(k)!r}" for k in changed)
            raise ValueError(f"{self.path} holds cases with other settings: {said}; choose another --out")

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
            raise ValueError(
                f"{self.path}: the case {row['key']} is not as it was written: delete its line, and it is "
                "evaluated again"
            )

    def add(self, row: Row) -> None:
        """Write a case, on the disk when this returns; `key` and `prompt_hash` are among its fields."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["key"]] = row
