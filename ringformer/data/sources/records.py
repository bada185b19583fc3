"""Records of a source: JSON objects, or rows of a table."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.sources.json_values import JsonText, parse_record
from ringformer.data.sources.malformed import Malformed, MalformedRecord
from ringformer.data.sources.row_sizes import Wanted
from ringformer.data.sources.source_files import KINDS, files_of
from ringformer.data.sources.tables import TABLES, Batch, read_tables
from ringformer.data.sources.text_encoding import UTF_8, Undecodable
from ringformer.data.sources.text_files import TooLarge, lines_of, open_text, undecodable_files

ROWS = ("jsonl", "json", *TABLES)
"""Kinds of source that have records."""
MOST_COPIES = 1000
"""Largest weight of a record."""
REST = "the rest of a JSON array, from a fault on"
"""Reason of an array that cannot be read to its end."""


class Row(NamedTuple):
    """A record of a source, and the name that errors use for it: a path and line, or a path and row. For an array, the
    name also has the record's number, because the whole file may be one line."""

    record: dict[str, Any]
    name: str


def weight_of(record: dict[str, Any], field: str) -> float:
    """Return the weight of a record, its number in `field`; 1 without a field. Raises MalformedRecord for anything
    else."""
    if not field:
        return 1.0
    if field not in record:
        raise MalformedRecord(f"it has no weight {field!r}; it has: {', '.join(record) or 'nothing'}", "no weight")
    weight: Any = record[field]
    if type(weight) not in (int, float) or not 0 <= weight <= MOST_COPIES:
        raise MalformedRecord(
            f"the weight {field!r} is {weight!r}; it must be a number from 0 to {MOST_COPIES:,}", "a wrong weight"
        )
    return float(weight)


def read_rows(
    source: str,
    *,
    split: str = "train",
    malformed: Malformed | None = None,
    only: tuple[str, ...] = (),
    encodings: Sequence[str] = UTF_8,
    max_bytes: int | None = None,
) -> Iterator[Row]:
    """Read the records of a source. The result can be iterated once.

    If a table has a column of `only`, no other columns are read. Blank lines are counted. A line that is not an object
    goes to `malformed`, which raises ValueError by default, and so does a file that cannot be decoded; that error names
    all such files.

    Raises ValueError for a record of more than `max_bytes` bytes, besides the `RECORD_BYTES` that any may have, before
    it is read; None: no limit.
    """
    kind, _, where = source.partition(":")
    if kind not in ROWS or not where:
        raise ValueError(f"source {source!r} has no records; accepted: {', '.join(KINDS[2:])}")
    if kind in TABLES:
        return _table_rows(read_tables(source, split=split, wanted=Wanted(only, max_bytes)), only)
    malformed = malformed or Malformed(skip=False)
    parse = {"jsonl": _jsonl, "json": _json}[kind]
    return _objects(_parsed(files_of(source), parse, encodings, malformed, max_bytes), malformed)


def _table_rows(batches: Iterable[Batch], only: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table. Columns of dates and times are left out unless `only` names them: no record needs
    them, and Python cannot hold all that Arrow can.

    Raises ValueError for a value that Python cannot hold.
    """
    for batch in batches:
        columns = _without_dates(batch.columns, only)
        try:
            records = columns.to_pylist()
        except (OverflowError, KeyError, ValueError) as error:  # KeyError: an unknown time zone
            raise ValueError(
                f"{batch.name(0)} or a row after it has a value that cannot be read: {error}; remove its column"
            ) from None
        for row, record in enumerate(records):
            yield Row(record, batch.name(row))


def _without_dates(columns: Any, only: Sequence[str]) -> Any:
    """Return the columns of a RecordBatch that hold no dates or times, and those of `only`."""
    from pyarrow.types import is_temporal

    dates = []
    for field in columns.schema:
        if is_temporal(field.type) and field.name not in only:
            dates.append(field.name)
    return columns.drop_columns(dates)


def _objects(records: Iterable[tuple[Any, str]], malformed: Malformed) -> Iterator[Row]:
    """Yield the records, with their names, that are JSON objects."""
    for record, name in records:
        if type(record) is dict:
            yield Row(record, name)
        else:
            malformed(f"{name} holds a JSON {type(record).__name__}, not an object", "not an object")


def _parsed(
    files: Sequence[Path],
    parse: Callable[..., Iterator[tuple[Any, str]]],
    encodings: Sequence[str],
    malformed: Malformed,
    max_bytes: int | None,
) -> Iterator[tuple[Any, str]]:
    """Yield the values of all files, with their names."""
    for number, path in enumerate(files):
        try:
            yield from parse(path, encodings, malformed, max_bytes)
        except Undecodable as fault:
            if not malformed.skip:
                raise undecodable_files(files[number:], encodings, by_line=parse is _jsonl) from None
            malformed.leave_out_file(str(path), f"not {' or '.join(encodings)}")
            malformed.first = malformed.first or f"{path}: {fault}"


def _jsonl(
    path: Path, encodings: Sequence[str], malformed: Malformed, max_bytes: int | None
) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(lines_of(path, encodings, max_bytes), 1):
        name = f"{path}:{number}"
        if isinstance(line, Undecodable):
            if not malformed.skip:
                raise line
            malformed(f"{name}: {line}", f"not {' or '.join(encodings)}")
        elif not line.strip():
            malformed.blank_line()
        else:
            try:
                record = parse_record(line, name, max_bytes)
            except TooLarge:
                raise
            except (ValueError, RecursionError) as error:
                malformed(f"{name} is not a line of JSON: {error}", "not JSON")
                continue
            yield record, name


def _json(
    path: Path, encodings: Sequence[str], malformed: Malformed, max_bytes: int | None
) -> Iterator[tuple[Any, str]]:
    """Yield the values of a JSON array. They are parsed one by one, so that the line and number (from 1) of each value
    are known. After a fault of the array itself, the rest of the file cannot be read."""
    with open_text(path, encodings) as file:
        text = JsonText(file)
        if text.next_sign() != "[":
            malformed(
                f"{path} is not a JSON array of objects; for one object per line use jsonl:{path}", "not a JSON array"
            )
            return
        text.pass_sign()
        number = 0
        while text.next_sign() != "]":
            number += 1
            name = f"{path}:{text.line} (record {number})"
            try:
                value = text.value(name, max_bytes)
            except TooLarge:
                raise
            except (ValueError, RecursionError) as error:
                malformed(f"{name}: the object that begins here is not JSON: {error}", REST)
                return
            yield value, name
            del value
            sign = text.next_sign()
            if sign == ",":
                text.pass_sign()
            elif sign != "]":
                malformed(
                    f"{name}: the object that begins here is followed by neither a comma nor the end of the array", REST
                )
                return
