"""Sources of documents: the Python standard library, text files, JSON lines, Hugging Face datasets.

    stdlib                  the .py files of the running Python's standard library, in order of relative path
    text:PATTERN            one document a file; the glob pattern may contain **
    jsonl:PATTERN           one JSON object a line, the text in `field`
    datasets:NAME_OR_PATH   a dataset of the Hub, or a folder made by `save_to_disk`, the text in `field`

A document without text is an error that names it, unless `skip_empty` is set. The standard library is the
exception: its empty files, mostly `__init__.py`, are always left out. Files are read as they are, byte for byte:
line ends are kept, and what is not UTF-8 becomes Python's `surrogateescape` characters.
"""

import glob
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("stdlib", "text:PATTERN", "jsonl:PATTERN", "datasets:NAME_OR_PATH")

STDLIB_EXCLUDED = frozenset({"site-packages", "test", "idlelib", "__pycache__"})
"""Folders of the standard library's tree that are not read."""


class Document(NamedTuple):
    """A text and the name to use for it in messages: a path, or a path and line."""

    text: str
    name: str


class Documents:
    """The documents of an iterable that have text; `skipped` counts those left out.

    Without `skip_empty`, a document without text raises ValueError.
    """

    def __init__(self, documents: Iterable[Document], *, skip_empty: bool = False):
        self._documents = documents
        self._skip_empty = skip_empty
        self.skipped = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped = 0
        for document in self._documents:
            if document.text:
                yield document
            elif self._skip_empty:
                self.skipped += 1
            else:
                raise ValueError(
                    f"{document.name} is an empty document; pass skip_empty=True (--config.data.skip_empty=True) "
                    "to leave such documents out and count them"
                )


def read_documents(source: str, *, field: str = "text", split: str = "train", skip_empty: bool = False) -> Documents:
    """The documents of `source` (see the top of this file), to be iterated once.

    Args:
      field: the key of the text, for `jsonl:` and `datasets:`.
      split: the split of a `datasets:` source.
      skip_empty: leave documents without text out, instead of raising ValueError.

    Raises:
      ValueError: for an unknown kind, a malformed line, a missing field or split, an empty document.
      FileNotFoundError: if no file matches.
    """
    kind, _, where = source.partition(":")
    if source == "stdlib":
        return Documents(_stdlib(Path(sysconfig.get_path("stdlib"))), skip_empty=True)
    if kind == "text" and where:
        return Documents(_text(_files(source, where)), skip_empty=skip_empty)
    if kind == "jsonl" and where:
        return Documents(_jsonl(_files(source, where), field), skip_empty=skip_empty)
    if kind == "datasets" and where:
        return Documents(_datasets(where, field, split), skip_empty=skip_empty)
    raise ValueError(f"unknown source {source!r}; accepted: {', '.join(KINDS)}")


def _stdlib(root: Path) -> Iterator[Document]:
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(path.as_posix() for path in relative if STDLIB_EXCLUDED.isdisjoint(path.parts[:-1])):
        yield Document(_read_text(root / path), path)


def _text(paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        yield Document(_read_text(path), str(path))


def _jsonl(paths: list[Path], field: str) -> Iterator[Document]:
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                name = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{name} is not a line of JSON: {error}") from None
                if type(record) is not dict:
                    raise ValueError(f"{name} holds a JSON {type(record).__name__}, not an object with {field!r}")
                _check_field(name, record, field)
                yield Document(_string(name, field, record[field]), name)


def _datasets(name: str, field: str, split: str) -> Iterator[Document]:
    dataset = _load_dataset(name, split)
    _check_field(f"dataset {name}", dataset.column_names, field)
    return (
        Document(_string(f"{name}:{row}", field, record[field]), f"{name}:{row}")
        for row, record in enumerate(dataset.select_columns([field]))
    )


def _load_dataset(name: str, split: str):
    import datasets  # slow to import, and needed by this source only

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
