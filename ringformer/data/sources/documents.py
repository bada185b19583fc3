"""Documents of a source: the text of a file, or of a field of a record.

A document without text is an error that names it, unless `skip_empty` is set. The standard library is the
exception: its empty files, mostly `__init__.py`, are always left out. Files are read byte for byte: line ends are kept,
and bytes that are not UTF-8 become Python's `surrogateescape` characters.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ringformer.data.sources.compressibility import Between
from ringformer.data.sources.records import ROWS, Row, read_rows, weight_of
from ringformer.data.sources.source_files import KINDS, files_of, open_file, source_files


class Document(NamedTuple):
    """A text, and the name that errors use for it: a path, or the name of its `Row`."""

    text: str
    name: str
    weight: float = 1.0
    """Number of copies that training gets."""


@dataclass
class Documents:
    """Documents of an iterable that have text; `skipped` counts the documents without.

    A document of more than `max_bytes` bytes raises ValueError; without `skip_empty`, so does an empty document.
    """

    documents: Iterable[Document]
    skip_empty: bool = False
    max_bytes: int | None = None
    between: Between | None = None
    """Documents to keep, of those with text; None: all."""
    skipped: int = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped, kept = 0, None if self.between is None else iter(self.between.keep)
        for document in self.documents:
            if document.text:
                check_size(document.name, len(document.text.encode("utf-8", "replace")), self.max_bytes)
                if kept is None or next(kept, True):
                    yield document
            elif self.skip_empty:
                self.skipped += 1
            else:
                raise ValueError(
                    f"{document.name} is an empty document; --skip_empty (for a run: --config.data.skip_empty=True) "
                    "skips and counts such documents"
                )

    @property
    def left_out(self) -> Counter[str]:
        """Number of documents left out so far, by reason."""
        counts = Counter({"empty documents skipped": self.skipped})
        if self.between is not None:
            low, high = self.between.low, self.between.high
            reason = f"documents dropped: gzip compresses them less than {low:.2f} or more than {high:.2f} times"
            counts[reason] = int((~self.between.keep).sum())
        return counts


def check_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raise ValueError if a document of `size` bytes has more than `max_bytes` bytes."""
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"{name} has more than max_document_bytes={max_bytes:,} bytes of text: split it, or raise the limit"
        )


def read_documents(
    source: str,
    *,
    field: str = "text",
    split: str = "train",
    skip_empty: bool = False,
    max_bytes: int | None = None,
    weight_field: str = "",
) -> Documents:
    """Read the documents of `source` (see `source_files.py`). The result can be iterated once.

    Args:
      field: the key of the text, for sources with records.
      split: the split of a dataset.
      skip_empty: skip documents without text instead of raising ValueError.
      max_bytes: most bytes of a document; None: no limit.
      weight_field: the key of a record's weight; "": all weigh 1.

    Raises:
      ValueError: for an unknown kind, a malformed line, a missing field or split, or an empty or too large document.
      FileNotFoundError: if no file matches.
    """
    kind, _, where = source.partition(":")
    if weight_field and kind not in ROWS:
        raise ValueError(f"weight_field={weight_field!r} needs a source with records, not {source!r}")
    if source == "stdlib":
        files = source_files(source).items()
        return Documents((Document(_read_text(path, None), name) for name, path in files), skip_empty=True)
    if kind == "text" and where:
        texts = (Document(_read_text(path, max_bytes), str(path)) for path in files_of(source))
        return Documents(texts, skip_empty=skip_empty)
    if kind in ROWS and where:
        rows = read_rows(source, split=split, only=(field, *filter(None, [weight_field])))
        return Documents(_fields(rows, field, weight_field), skip_empty=skip_empty, max_bytes=max_bytes)
    raise ValueError(f"unknown source {source!r}; accepted: {', '.join(KINDS)}")


def _fields(rows: Iterable[Row], field: str, weight_field: str) -> Iterator[Document]:
    for record, name in rows:
        if field not in record:
            raise ValueError(f"{name} has no field {field!r}; it has: {', '.join(record) or 'none'}")
        text = "" if record[field] is None else record[field]
        if type(text) is not str:
            raise ValueError(f"field {field!r} of {name} holds {type(text).__name__}, not text")
        try:
            weight = weight_of(record, weight_field)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        yield Document(text, name, weight)


def _read_text(path: Path, max_bytes: int | None) -> str:
    with open_file(path) as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    check_size(str(path), len(content), max_bytes)
    return content.decode("utf-8", "surrogateescape")
