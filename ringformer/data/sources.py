"""Sources of documents and records: the standard library, text files, JSON, parquet, Hugging Face datasets.

    stdlib                  the .py files of the running Python's standard library, in order of relative path
    text:PATTERN            one document per file; the glob pattern may contain **
    jsonl:PATTERN           one JSON object per line, with the text in `field`
    json:PATTERN            one array of JSON objects per file, with the text in `field`
    parquet:PATTERN         one document per row, with the text in `field`
    datasets:NAME_OR_PATH   a dataset of the Hub, or a folder made by `save_to_disk`, with the text in `field`

A document without text is an error that names it, unless `skip_empty` is set. The standard library is the
exception: its empty files, mostly `__init__.py`, are always left out. Files are read byte for byte: line ends are kept,
and bytes that are not UTF-8 become Python's `surrogateescape` characters.
"""

import glob
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.optional_packages import needed_for

KINDS = ("stdlib", "text:PATTERN", "jsonl:PATTERN", "json:PATTERN", "parquet:PATTERN", "datasets:NAME_OR_PATH")

ROWS = ("jsonl", "json", "parquet", "datasets")
"""Kinds of source that have records."""

STDLIB_EXCLUDED = frozenset({"site-packages", "test", "idlelib", "__pycache__"})
"""Folders of the standard library to skip."""


class Document(NamedTuple):
    """A text and its name in errors: a path, or the name of its `Row`."""

    text: str
    name: str


class Row(NamedTuple):
    """A record of a source, and its name in errors: a path and line, or a path and row. For an array, the name also has
    the record's number, because the whole file may be one line."""

    record: dict[str, Any]
    name: str


class Malformed:
    """Handler of records that cannot be read: raises an error naming the first such record or, with `skip`, counts
    them.
    """

    def __init__(self, *, skip: bool):
        self.skip = skip
        self.count = 0

    def __call__(self, message: str) -> None:
        if not self.skip:
            raise ValueError(f"{message}. Repair it, or skip and count such records: --skip_malformed")
        self.count += 1


class Documents:
    """Documents of an iterable that have text; `skipped` counts the documents left out.

    A document of more than `max_bytes` bytes raises ValueError; without `skip_empty`, so does an empty document.
    """

    def __init__(self, documents: Iterable[Document], *, skip_empty: bool = False, max_bytes: int | None = None):
        self._documents = documents
        self._skip_empty = skip_empty
        self._max_bytes = max_bytes
        self.skipped = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped = 0
        for document in self._documents:
            if document.text:
                check_size(document.name, [document.text], self._max_bytes)
                yield document
            elif self._skip_empty:
                self.skipped += 1
            else:
                raise ValueError(
                    f"{document.name} is an empty document; --skip_empty (for a run: --config.data.skip_empty=True) "
                    "skips and counts such documents"
                )


def check_size(name: str, texts: Iterable[str], max_bytes: int | None) -> None:
    """Raise ValueError if the texts of a document have more than `max_bytes` bytes."""
    _check_bytes(name, sum(len(text.encode("utf-8", "replace")) for text in texts), max_bytes)


def _check_bytes(name: str, size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"{name} has {size:,} bytes of text, more than max_document_bytes={max_bytes:,}: split it, or "
            "raise the limit"
        )


def read_documents(
    source: str, *, field: str = "text", split: str = "train", skip_empty: bool = False, max_bytes: int | None = None
) -> Documents:
    """Read the documents of `source` (see the top of this file). The result can be iterated once.

    Args:
      field: the key of the text, for `jsonl:` and `datasets:`.
      split: the split of a `datasets:` source.
      skip_empty: skip documents without text instead of raising ValueError.
      max_bytes: most bytes of a document; None: no limit.

    Raises:
      ValueError: for an unknown kind, a malformed line, a missing field or split, or an empty or too large document.
      FileNotFoundError: if no file matches.
    """
    kind, _, where = source.partition(":")
    if source == "stdlib":
        return Documents(_stdlib(Path(sysconfig.get_path("stdlib"))), skip_empty=True)
    if kind == "text" and where:
        return Documents(_text(_files(source, where), max_bytes), skip_empty=skip_empty)
    if kind in ROWS and where:
        rows = read_rows(source, split=split, only=field)
        return Documents(_fields(rows, field), skip_empty=skip_empty, max_bytes=max_bytes)
    raise ValueError(f"unknown source {source!r}; accepted: {', '.join(KINDS)}")


def read_rows(
    source: str, *, split: str = "train", malformed: Malformed | None = None, only: str | None = None
) -> Iterator[Row]:
    """Read the records of a `jsonl:`, `json:`, `parquet:` or `datasets:` source. The result can be iterated once.

    If a table has the column `only`, no other column is read. A line that is not an object goes to `malformed`, which
    raises ValueError by default.
    """
    kind, _, where = source.partition(":")
    if kind not in ROWS or not where:
        raise ValueError(f"source {source!r} has no records; accepted: {', '.join(KINDS[2:])}")
    if kind == "datasets":
        return _datasets(where, split, only)
    if kind == "parquet":
        return _parquet(_files(source, where), only)
    lines = _jsonl if kind == "jsonl" else _json
    return lines(_files(source, where), malformed or Malformed(skip=False))


def source_files(source: str) -> dict[str, Path]:
    """Return the files of `source` by name, to detect changes; empty for a dataset of the Hub, or if the files are
    gone.
    """
    kind, _, where = source.partition(":")
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return {name: root / name for name in _stdlib_names(root)}
    if kind == "datasets":
        return {str(path): path for path in sorted(Path(where).rglob("*")) if path.is_file()}
    return {path: Path(path) for path in sorted(glob.glob(where, recursive=True)) if Path(path).is_file()}


def _stdlib_names(root: Path) -> list[str]:
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in relative if STDLIB_EXCLUDED.isdisjoint(path.parts[:-1]))


def _stdlib(root: Path) -> Iterator[Document]:
    for path in _stdlib_names(root):
        yield Document(_read_text(root / path), path)


def _text(paths: list[Path], max_bytes: int | None) -> Iterator[Document]:
    for path in paths:
        _check_bytes(str(path), path.stat().st_size, max_bytes)
        yield Document(_read_text(path), str(path))


def _fields(rows: Iterable[Row], field: str) -> Iterator[Document]:
    for record, name in rows:
        _check_field(name, record, field)
        yield Document(_string(name, field, record[field]), name)


def _jsonl(paths: list[Path], malformed: Malformed) -> Iterator[Row]:
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                name = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    malformed(f"{name} is not a line of JSON: {error}")
                    continue
                if type(record) is dict:
                    yield Row(record, name)
                else:
                    malformed(f"{name} holds a JSON {type(record).__name__}, not an object")


def _json(paths: list[Path], malformed: Malformed) -> Iterator[Row]:
    """Yield the objects of JSON arrays. They are parsed one by one, so that the line and number (from 1) of each object
    are known."""
    space, decoder = re.compile(r"\s*"), json.JSONDecoder()

    def skip_space(text: str, place: int) -> int:
        match = space.match(text, place)
        return match.end() if match else place

    for path in paths:
        text = path.read_text(encoding="utf-8-sig")
        place, line, number, opened = skip_space(text, 0), 1, 0, 0
        if text[place : place + 1] != "[":
            raise ValueError(f"{path} is not a JSON array of objects; for one object per line use jsonl:{path}")
        while text[place] in "[,":
            place = skip_space(text, place + 1)
            if text[place : place + 1] == "]":
                break
            line, number, opened = line + text.count("\n", opened, place), number + 1, place
            name = f"{path}:{line} (record {number})"
            try:
                record, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}: the object that begins here is not JSON: {error}") from None
            place = skip_space(text, place)
            if text[place : place + 1] not in (",", "]"):
                raise ValueError(
                    f"{name}: the object that begins here is followed by neither a comma nor the end of the array"
                )
            if type(record) is dict:
                yield Row(record, name)
            else:
                malformed(f"{name} holds a JSON {type(record).__name__}, not an object")


def _parquet(paths: list[Path], only: str | None) -> Iterator[Row]:
    with needed_for("a parquet: source"):
        import pyarrow
        from pyarrow import parquet

    for path in paths:
        try:
            table = parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a parquet file: {error}") from None
        with table:
            number = 0
            columns = [only] if only in table.schema_arrow.names else None
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield Row(record, f"{path}:{number}")
                    number += 1


def _datasets(name: str, split: str, only: str | None) -> Iterator[Row]:
    dataset = _load_dataset(name, split)
    dataset = dataset.select_columns([only]) if only in dataset.column_names else dataset
    return (Row(record, f"{name}:{row}") for row, record in enumerate(dataset))


def _load_dataset(name: str, split: str):
    with needed_for("a datasets: source"):
        import datasets  # slow to import

    folder = Path(name)
    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(name)
        if split not in splits:
            raise ValueError(f"dataset {name} has no split {split!r}; it has: {', '.join(splits)}")
        return splits[split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(name)
    return datasets.load_dataset(name, split=split)


def _files(source: str, pattern: str) -> list[Path]:
    files = [Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if Path(path).is_file()]
    if not files:
        hint = f"; it is a folder: did you mean {pattern.rstrip('/')}/**/*?" if Path(pattern).is_dir() else ""
        raise FileNotFoundError(f"no file matches {pattern!r} of source {source!r}{hint}")
    return files


def _read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _check_field(name: str, fields: Iterable[str], field: str) -> None:
    fields = list(fields)
    if field not in fields:
        raise ValueError(f"{name} has no field {field!r}; it has: {', '.join(fields) or 'none'}")


def _string(name: str, field: str, value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"field {field!r} of {name} holds {type(value).__name__}, not text")
    return value
