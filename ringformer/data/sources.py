"""Sources of documents and records: the standard library, text files, JSON, parquet, Hugging Face datasets.

    stdlib                  the .py files of the running Python's standard library, in order of relative path
    text:PATTERN            one document per file; the glob pattern may contain **
    jsonl:PATTERN           one JSON object per line, with the text in `field`
    json:PATTERN            one array of JSON objects per file, with the text in `field`
    parquet:PATTERN         one document per row, with the text in `field`
    datasets:NAME_OR_PATH   a dataset of the hub, or a folder made by `save_to_disk`, with the text in `field`
    hf://NAME               a dataset of the hub, downloaded first (`files/hub.py`), with the text in `field`

A document without text is an error that names it, unless `skip_empty` is set. The standard library is the
exception: its empty files, mostly `__init__.py`, are always left out. Files are read byte for byte: line ends are kept,
and bytes that are not UTF-8 become Python's `surrogateescape` characters.
"""

import glob
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.optional_packages import needed_for
from ringformer.files.hub import local

KINDS = (
    "stdlib",
    "text:PATTERN",
    "jsonl:PATTERN",
    "json:PATTERN",
    "parquet:PATTERN",
    "datasets:NAME_OR_PATH",
    "hf://NAME",
)

ROWS = ("jsonl", "json", "parquet", "datasets", "hf")
"""Kinds of source that have records."""

_SEPARATOR = re.compile(r"\s*(?:,\s*|(?=\]))(\]?)")

STDLIB_EXCLUDED = frozenset({"site-packages", "test", "idlelib", "__pycache__"})
"""Folders of the standard library to skip."""


class Document(NamedTuple):
    """A text, and the name that errors use for it: a path, or the name of its `Row`."""

    text: str
    name: str


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


@dataclass
class Documents:
    """Documents of an iterable that have text; `skipped` counts the documents left out.

    A document of more than `max_bytes` bytes raises ValueError; without `skip_empty`, so does an empty document.
    """

    documents: Iterable[Document]
    skip_empty: bool = False
    max_bytes: int | None = None
    skipped: int = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped = 0
        for document in self.documents:
            if document.text:
                check_size(document.name, len(document.text.encode("utf-8", "replace")), self.max_bytes)
                yield document
            elif self.skip_empty:
                self.skipped += 1
            else:
                raise ValueError(
                    f"{document.name} is an empty document; --skip_empty (for a run: --config.data.skip_empty=True) "
                    "skips and counts such documents"
                )


def check_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raise ValueError if a document of `size` bytes has more than `max_bytes` bytes."""
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
        files = source_files(source).items()
        return Documents((Document(_read_text(path), name) for name, path in files), skip_empty=True)
    if kind == "text" and where:
        return Documents(_text(_files(source), max_bytes), skip_empty=skip_empty)
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
    if kind in ("datasets", "hf"):
        return _datasets(where if kind == "datasets" else source, split, only)
    malformed = malformed or Malformed(skip=False)
    readers: dict[str, Callable[[Path], Iterator[tuple[Any, str]]]] = {
        "jsonl": partial(_jsonl, malformed=malformed),
        "json": _json,
        "parquet": partial(_parquet, only=only),
    }
    return _objects(chain.from_iterable(map(readers[kind], _files(source))), malformed)


def source_files(source: str) -> dict[str, Path]:
    """Return the files of `source` by name, to detect changes; empty for a dataset of the Hub, or if the files are
    gone.
    """
    kind, _, where = source.partition(":")
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        relative = (path.relative_to(root) for path in root.rglob("*.py"))
        names = sorted(path.as_posix() for path in relative if STDLIB_EXCLUDED.isdisjoint(path.parts[:-1]))
        return {name: root / name for name in names}
    if kind == "hf":
        return {}
    if kind == "datasets":
        return {str(path): path for path in sorted(Path(where).rglob("*")) if path.is_file()}
    return {path: Path(path) for path in sorted(glob.glob(where, recursive=True)) if Path(path).is_file()}


def _text(paths: list[Path], max_bytes: int | None) -> Iterator[Document]:
    for path in paths:
        check_size(str(path), path.stat().st_size, max_bytes)
        yield Document(_read_text(path), str(path))


def _fields(rows: Iterable[Row], field: str) -> Iterator[Document]:
    for record, name in rows:
        if field not in record:
            raise ValueError(f"{name} has no field {field!r}; it has: {', '.join(record) or 'none'}")
        text = record[field]
        if type(text) is not str:
            raise ValueError(f"field {field!r} of {name} holds {type(text).__name__}, not text")
        yield Document(text, name)


def _objects(records: Iterable[tuple[Any, str]], malformed: Malformed) -> Iterator[Row]:
    """Yield the records, with their names, that are JSON objects."""
    for record, name in records:
        if type(record) is dict:
            yield Row(record, name)
        else:
            malformed(f"{name} holds a JSON {type(record).__name__}, not an object")


def _jsonl(path: Path, malformed: Malformed) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as lines:
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
    text = path.read_text(encoding="utf-8-sig")
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


def _parquet(path: Path, only: str | None) -> Iterator[tuple[Any, str]]:
    with needed_for("a parquet: source"):
        import pyarrow
        from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    with table:
        columns = [only] if only in table.schema_arrow.names else None
        batches = table.iter_batches(batch_size=1024, columns=columns)
        records = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((record, f"{path}:{number}") for number, record in enumerate(records))


def _datasets(name: str, split: str, only: str | None) -> Iterator[Row]:
    dataset = _load_dataset(name, split)
    dataset = dataset.select_columns([only]) if only in dataset.column_names else dataset
    return (Row(record, f"{name}:{row}") for row, record in enumerate(dataset))


def _load_dataset(name: str, split: str):
    with needed_for("a datasets: source"):
        import datasets  # slow to import

    folder = local(name, kind="dataset")
    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(folder))
        if split not in splits:
            raise ValueError(f"dataset {name} has no split {split!r}; it has: {', '.join(splits)}")
        return splits[split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(str(folder))
    return datasets.load_dataset(str(folder) if folder.is_dir() else name, split=split)


def _files(source: str) -> list[Path]:
    pattern = source.partition(":")[2]
    files = list(source_files(source).values())
    if not files:
        hint = f"; it is a folder: did you mean {pattern.rstrip('/')}/**/*?" if Path(pattern).is_dir() else ""
        raise FileNotFoundError(f"no file matches {pattern!r} of source {source!r}{hint}")
    return files


def _read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")
