"""The file of an evaluation's cases: one JSON object per line, written as each case finishes and read to resume.

The first line names the evaluation and its settings. Cases with other settings are never added to a file.
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
    """Read the settings of a file of cases, and its cases by key; (None, {}) for a file truncated in its first line.

    Raises:
      ValueError: if the file holds another evaluation, a case twice, or an invalid line. A truncated last line is
        ignored: the evaluation was killed while writing it.
      FileNotFoundError: if the file does not exist.
    """
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    kept = lines[:-1]  # the rest is a truncated line, or empty
    if not kept:
        if not '{"evaluation": '.startswith(lines[0][:15]):  # not a truncated first line
            raise ValueError(f"{path} was not written by an evaluation: choose another --out")
        return None, {}
    try:
        head = json.loads(kept[0])
        name, settings = head["evaluation"], dict(head["settings"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} was not written by an evaluation: choose another --out") from None
    if kept[1:] and name != evaluation:
        raise ValueError(f"{path} holds cases of {name}, not of {evaluation}: choose another --out")
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
            raise ValueError(f"{path}:{number} is not a case: {line[:60]!r}; delete the line") from None
        if row["key"] in rows:
            raise ValueError(f"{path}:{number} repeats an earlier case: {line[:60]!r}; delete the line")
        rows[row["key"]] = row
    return settings, rows


class CaseFile:
    """Finished cases, by key.

    Args:
      path: the file; its folder is created.
      evaluation: lines, needle, ruler or perplexity.
      settings: settings that decide an outcome, besides the case itself.
      check: checks a row read from the file.

    Raises:
      ValueError: if the file holds cases with other settings, or if `read_cases` refuses it.
    """

    def __init__(self, path: Path, evaluation: str, settings: dict[str, Any], check: CheckRow):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.loads(json.dumps({"evaluation": evaluation, "settings": settings}))
        old, self.rows = read_cases(path, evaluation, check) if path.exists() else (None, {})
        if self.rows:
            self._check_settings(old or {}, head["settings"])
        part = path.with_suffix(".part")  # a crash while writing it leaves the old file intact
        part.write_text("".join(json.dumps(row) + "\n" for row in (head, *self.rows.values())), encoding="utf-8")
        part.replace(path)

    def _check_settings(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        if changed := sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k)):
            changes = "; ".join(f"{k} is {old.get(k)!r}, not {new.get(k)!r}" for k in changed)
            raise ValueError(f"{self.path} holds cases with other settings: {changes}; choose another --out")

    def done(self, key: str, prompt_hash: str) -> bool:
        """Return True if the file has the case. Raises ValueError if the file has it with a different prompt."""
        row = self.rows.get(key)
        if row is not None and row["prompt_hash"] != prompt_hash:
            raise ValueError(
                f"{self.path} holds the case {key} with another prompt: the text, the tokenizer or ringformer's words "
                "have changed; choose another --out"
            )
        return row is not None

    def check(self, row: Row) -> None:
        """Raise ValueError if the file's row with this key differs: somebody edited it."""
        if self.rows[row["key"]] != json.loads(json.dumps(row)):
            raise ValueError(f"{self.path}: the case {row['key']} was edited: delete its line to evaluate it again")

    def add(self, row: Row) -> None:
        """Write a case and sync it to disk; its fields include `key` and `prompt_hash`."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["key"]] = row
