"""Records of a source: JSON objects, or rows of a table."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.sources.source_files import KINDS, files_of, open_file
from ringformer.data.sources.tables import TABLES, read_tables

ROWS = ("jsonl", "json", *TABLES)
"""Kinds of source that have records."""
MOST_COPIES = 1000
"""Largest weight of a record."""

_SEPARATOR = re.compile(r"\s*(?:,\s*|(?=\]))(\]?)")


class Row(NamedTuple):
    """A record of a source, and the name that errors use for it: a path and line, or a path and row. For an array, the
    name also has the record's number, because the whole file may be one line."""

    record: dict[str, Any]
    name: str


@dataclass
class Malformed:
    """Handler of records that cannot be read: raises an error naming the first such record or, with `skip`, counts
    them.
    """

    skip: bool
    count: int = 0

    def __call__(self, message: str) -> None:
        if not self.skip:
            raise ValueError(f"{message}. Repair it, or skip and count such records: --skip_malformed")
        self.count += 1


def weight_of(record: dict[str, Any], field: str) -> float:
    """Return the weight of a record, its number in `field`; 1 without a field. Raises ValueError for anything else."""
    if field and field not in record:
        raise ValueError(f"it has no weight {field!r}; it has: {', '.join(record) or 'nothing'}")
    weight: Any = record[field] if field else 1.0
    if type(weight) not in (int, float) or not 0 <= weight <= MOST_COPIES:
        raise ValueError(f"the weight {field!r} is {weight!r}; it must be a number from 0 to {MOST_COPIES:,}")
    return float(weight)


def read_rows(
    source: str, *, split: str = "train", malformed: Malformed | None = None, only: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Read the records of a source. The result can be iterated once.

    If a table has a column of `only`, no other columns are read. A line that is not an object goes to `malformed`,
    which raises ValueError by default.
    """
    kind, _, where = source.partition(":")
    if kind not in ROWS or not where:
        raise ValueError(f"source {source!r} has no records; accepted: {', '.join(KINDS[2:])}")
    if kind in TABLES:
        return (
            Row(record, batch.name(row))
            for batch in read_tables(source, split=split, only=only)
            for row, record in enumerate(batch.columns.to_pylist())
        )
    malformed = malformed or Malformed(skip=False)
    readers: dict[str, Callable[[Path], Iterator[tuple[Any, str]]]] = {
        "jsonl": partial(_jsonl, malformed=malformed),
        "json": _json,
    }
    return _objects(chain.from_iterable(map(readers[kind], files_of(source))), malformed)


def _objects(records: Iterable[tuple[Any, str]], malformed: Malformed) -> Iterator[Row]:
    """Yield the records, with their names, that are JSON objects."""
    for record, name in records:
        if type(record) is dict:
            yield Row(record, name)
        else:
            malformed(f"{name} holds a JSON {type(record).__name__}, not an object")


def _jsonl(path: Path, malformed: Malformed) -> Iterator[tuple[Any, str]]:
    with open_file(path) as lines:
        for number, line in enumerate(lines, 1):
            name = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                malformed(f"{name} is not a line of JSON: {error}")
                continue
            yield record, name


def _json(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the values of a JSON array. They are parsed one by one, so that the line and number (from 1) of each value
    are known."""
    with open_file(path) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    before = re.match(r"\s*\[\s*(\]?)", text)
    if before is None:
        raise ValueError(f"{path} is not a JSON array of objects; for one object per line use jsonl:{path}")
    line, number, begin = 1, 0, 0
    while not before[1]:
        line, number, begin = line + text.count("\n", begin, before.end()), number + 1, before.end()
        name = f"{path}:{line} (record {number})"
        try:
            record, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: the object that begins here is not JSON: {error}") from None
        before = _SEPARATOR.match(text, end)
        if before is None:
            raise ValueError(
                f"{name}: the object that begins here is followed by neither a comma nor the end of the array"
            )
        yield record, name
