"""File of an evaluation's cases: one JSON object per line, written when a case finishes and read to resume the
evaluation.

The first line names the evaluation and its settings. Cases with other settings are never added to a file.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ringformer.files.atomic import append_line, write_whole
from ringformer.files.json_text import parse_json
from ringformer.files.resumed_lines import differences

Row = dict[str, Any]
CheckRow = Callable[[Row], None]
"""Function that raises ValueError, KeyError or TypeError for a row that the evaluation did not write."""
HEAD = '{"evaluation": '
"""Beginning of every file of cases."""


def read_cases(path: Path, evaluation: str, check: CheckRow) -> tuple[dict[str, Any] | None, dict[str, Row]]:
    """Read the settings of a file of cases, and its cases by key; (None, {}) if the file is truncated in its first
    line.

    Raises:
      ValueError: if the file holds another evaluation, a case twice, or an invalid line. A truncated last line is
        ignored: the evaluation was killed while writing it.
      FileNotFoundError: if the file does not exist.
    """
    *lines, truncated = path.read_bytes().decode("utf-8", "replace").split("\n")
    if not lines and HEAD.startswith(truncated[: len(HEAD)]):
        return None, {}
    try:
        head = parse_json(lines[0])
        name = head["evaluation"]
        settings = dict(head["settings"])
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{path} was not written by an evaluation: choose another --out") from None
    if lines[1:] and name != evaluation:
        raise ValueError(f"{path} holds cases of {name}, not of {evaluation}: choose another --out")
    rows: dict[str, Row] = {}
    fields: dict[str, type] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            row = parse_json(line)
            check(row)
            kinds = {field: type(value) for field, value in row.items()}
            fields = fields or kinds
            if kinds != fields or not isinstance(row["prompt_hash"], str):
                raise TypeError
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
      evaluation: its name.
      settings: settings that determine an outcome, besides the case itself.
      check: function that checks a row read from the file.

    Raises:
      ValueError: if the file holds cases with other settings, or if `read_cases` refuses it.
    """

    def __init__(self, path: Path, evaluation: str, settings: dict[str, Any], check: CheckRow):
        self.path = path
        self.evaluation = evaluation
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, Row]
        old, self.rows = read_cases(path, evaluation, check) if path.exists() else (None, {})
        old = old or {}
        changes = differences(old, json.loads(json.dumps(settings)))
        if self.rows and changes:
            raise ValueError(f"{path} holds cases with other settings: {'; '.join(changes)}; choose another --out")
        head = {"evaluation": evaluation, "settings": settings}
        lines = map(json.dumps, (head, *self.rows.values()))
        write_whole(path, "\n".join(lines) + "\n")

    def missing(self, cases: Sequence[Any]) -> list[Any]:
        """Return the cases that the file lacks, according to each case's `key`. Raises ValueError for a case that the
        file has with a different `prompt_hash`."""
        for case in cases:
            if case.key in self.rows and self.rows[case.key]["prompt_hash"] != case.prompt_hash:
                raise ValueError(
                    f"{self.path} holds the case {case.key} with another prompt: the text, the tokenizer or "
                    "ringformer's words have changed; choose another --out"
                )
        return [case for case in cases if case.key not in self.rows]

    def check(self, row: Row) -> None:
        """Raise ValueError if the file has a different row with this key, because somebody edited it."""
        if self.rows[row["key"]] != json.loads(json.dumps(row)):
            raise ValueError(f"{self.path}: the case {row['key']} was edited: delete its line to evaluate it again")

    def measure(self, cases: Iterable[Any], batch_size: int, rows_of: Callable[[list[Any]], Iterable[Row]]) -> None:
        """Compute the rows of cases batch by batch, and write each row to disk.

        Args:
          rows_of: function from a batch to the row of each of its cases. A short batch is padded with copies of its
            last case, so that all batches have the same shape.
        """
        left = iter(cases)
        while batch := list(islice(left, batch_size)):
            padded = [*batch, *[batch[-1]] * (batch_size - len(batch))]
            for row in islice(rows_of(padded), len(batch)):
                append_line(self.path, json.dumps(row))
                self.rows[row["key"]] = row
