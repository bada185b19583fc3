"""Documents of a source: the text of a file, or of a field of a record.

A document without text is an error that names it, unless `skip_empty` is set. The standard library and the installed
packages are the exception: their empty files, mostly `__init__.py`, are always left out. Line ends of files are kept.
A file in none of the encodings is an error; binary files are left out, counted and named. For the tokenizer `bytes`, a
pattern of files reads them byte for byte: bytes that are not UTF-8 become Python's `surrogateescape` characters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.sources.compressibility import Between
from ringformer.data.sources.joined_files import in_groups, joined
from ringformer.data.sources.malformed import Malformed, MalformedRecord
from ringformer.data.sources.records import ROWS, Row, read_rows, weight_of
from ringformer.data.sources.source_files import INSTALLED, KINDS, files_of, source_files
from ringformer.data.sources.text_encoding import Undecodable, parse_encodings, utf8_size
from ringformer.data.sources.text_files import Binary, check_size, read_bytes, read_text, undecodable_files


class Document(NamedTuple):
    """A text, and the name that errors use for it: a path, or the name of its `Row`."""

    text: str
    name: str
    weight: float = 1.0
    """Number of copies that training gets."""
    is_file: bool = False
    """True for a whole file, or for files that were joined: the name is its path, or that of their folder."""


@dataclass
class Documents:
    """Documents of an iterable that have text; `skipped` counts the documents without. Without `skip_empty`, an empty
    document raises ValueError.
    """

    documents: Iterable[Document]
    skip_empty: bool = False
    between: Between | None = None
    """Documents to keep, of those with text; None: all."""
    malformed: Malformed = field(default_factory=lambda: Malformed(skip=False))
    """Counts of what could not be read."""
    skipped: int = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped = 0
        choices: Iterator[bool] = iter(())
        if self.between is not None:
            choices = iter(self.between.keep)
        for document in self.documents:
            if document.text:
                if next(choices, True):
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
        counts = Counter({"empty documents skipped": self.skipped}) + self.malformed.counts
        if self.between is not None:
            low = self.between.low
            high = self.between.high
            reason = f"documents dropped: gzip compresses them less than {low:.2f} or more than {high:.2f} times"
            counts[reason] = int((~self.between.keep).sum())
        return counts


def read_documents(
    source: str,
    *,
    field: str = "text",
    split: str = "train",
    skip_empty: bool = False,
    max_bytes: int | None = None,
    weight_field: str = "",
    encoding: str = "",
    any_bytes: bool = True,
    join: str = "",
    malformed: Malformed | None = None,
    change: Callable[[Document], Document] | None = None,
) -> Documents:
    """Read the documents of `source` (see `source_files.py`). The result can be iterated once.

    Args:
      field: the key of the text, for sources with records.
      split: the split of a dataset.
      skip_empty: skip documents without text instead of raising ValueError.
      max_bytes: most bytes of a document; None: no limit.
      weight_field: the key of a record's weight; "": all weigh 1.
      encoding: encodings to try (`parse_encodings`), for files of text and JSON; "": UTF-8.
      any_bytes: read files of text byte for byte if they are not UTF-8, as the tokenizer `bytes` can.
      join: join files into documents (`joined_files.py`); "": each is one.
      malformed: handler of records and files that cannot be read; None: they raise ValueError.
      change: changes documents before it is known which of them are empty, or raises MalformedRecord.

    Raises:
      ValueError: for an unknown kind, a malformed line, a missing field or split, or an empty or too large document.
      FileNotFoundError: if no file matches.
    """
    kind, _, where = source.partition(":")
    encodings = parse_encodings(encoding)
    malformed = malformed or Malformed(skip=False)
    if weight_field and kind not in ROWS:
        raise ValueError(
            f"weight_field={weight_field!r} needs a source with records, not {source!r}: leave out --weight_field"
        )
    any_bytes = any_bytes and not encoding
    if source in ("stdlib", INSTALLED):
        skip_empty = True
        files = source_files(source)
        documents = _files(in_groups(files, source, join), encodings, max_bytes, any_bytes, malformed)
    elif kind == "text" and where:
        files = {str(path): path for path in files_of(source)}
        patterned = any_bytes and not Path(where).is_dir()
        documents = _files(in_groups(files, source, join), encodings, max_bytes, patterned, malformed)
    elif kind in ROWS and where:
        only = (field, *filter(None, [weight_field]))
        rows = read_rows(source, split=split, malformed=malformed, only=only, encodings=encodings, max_bytes=max_bytes)
        errors = "surrogateescape" if any_bytes else "strict"
        documents = _fields(rows, field, weight_field, max_bytes, errors, malformed)
    else:
        raise ValueError(f"unknown source {source!r}; accepted: {', '.join(KINDS)}")
    if change is not None:
        documents = _changed(documents, change, malformed)
    if join:
        documents = _joined(documents, source, join, max_bytes)
    return Documents(documents, skip_empty=skip_empty, malformed=malformed)


def _files(
    files: Mapping[str, Path], encodings: Sequence[str], max_bytes: int | None, any_bytes: bool, malformed: Malformed
) -> Iterator[Document]:
    """Yield a document for each file that is text."""
    for number, (name, path) in enumerate(files.items()):
        try:
            if any_bytes:
                text = read_bytes(path, max_bytes).decode("utf-8", "surrogateescape")
            else:
                text = read_text(path, encodings, max_bytes)
        except Binary:
            malformed.leave_out_file(name, "binary")
        except Undecodable as fault:
            if not malformed.skip:
                raise undecodable_files(list(files.values())[number:], encodings) from None
            malformed.leave_out_file(name, f"not {' or '.join(encodings)}")
            malformed.first = malformed.first or f"{name}: {fault}"
        else:
            yield Document(text, name, is_file=True)


def _fields(
    rows: Iterable[Row], field: str, weight_field: str, max_bytes: int | None, errors: str, malformed: Malformed
) -> Iterator[Document]:
    """Yield the text in a field of each record. `errors` handles halves of surrogate pairs, as in `str.encode`."""
    for record, name in rows:
        try:
            text = _text(record, field)
        except MalformedRecord as fault:
            malformed(f"{name}: {fault}", fault.reason, record)
            continue
        try:
            size = utf8_size(text, errors)
        except UnicodeEncodeError as error:
            check_size(name, utf8_size(text, "surrogatepass"), max_bytes)
            malformed(f"{name}: its text is not valid Unicode: {error}", "not valid Unicode")
            continue
        check_size(name, size, max_bytes)
        try:
            weight = weight_of(record, weight_field)
        except MalformedRecord as fault:
            malformed(f"{name}: {fault}", fault.reason)
            continue
        yield Document(text, name, weight)


def _changed(
    documents: Iterable[Document], change: Callable[[Document], Document], malformed: Malformed
) -> Iterator[Document]:
    for document in documents:
        try:
            changed = change(document)
        except MalformedRecord as fault:
            malformed(f"{document.name}: {fault}", fault.reason)
            continue
        yield changed


def _joined(documents: Iterable[Document], source: str, join: str, max_bytes: int | None) -> Iterator[Document]:
    """Yield the documents that files are joined to. Raises ValueError for one of more than `max_bytes` bytes."""
    texts = ((document.name, document.text) for document in documents)
    for name, text in joined(texts, source, join):
        check_size(name, utf8_size(text, "surrogateescape"), max_bytes)
        yield Document(text, name, is_file=True)


def _text(record: Mapping[str, Any], field: str) -> str:
    if field not in record:
        reason = f"no field {field!r}"
        raise MalformedRecord(f"it has {reason}; it has: {', '.join(record) or 'none'}", reason)
    text: Any = record[field]
    if text is None:
        return ""
    if type(text) is not str:
        kind = type(text).__name__
        raise MalformedRecord(f"its field {field!r} holds {kind}, not text", f"no text in the field {field!r}")
    return text
