"""Sources that are tables: Parquet and Arrow files, and Hugging Face datasets, read as batches of Arrow columns."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringformer.data.optional_packages import needed_for
from ringformer.data.sources.arrow_columns import ArrowReader
from ringformer.data.sources.parquet_pages import MOST_ROWS, batch_rows, coded_texts, row_groups
from ringformer.data.sources.row_sizes import (
    PYTHON_NUMBER,
    VALUE_BYTES,
    Damaged,
    RowLimit,
    RowTooLarge,
    array_sizes,
    row_limit,
)
from ringformer.data.sources.source_files import files_of
from ringformer.data.sources.text_files import too_large
from ringformer.files.hub import local, on_hub, snapshot

TABLES = ("parquet", "arrow", "datasets", "hf")
"""Kinds of source that are tables."""

BUFFER_BYTES = 2**20
"""Bytes of a Parquet column to read at a time."""


class Batch(NamedTuple):
    """Consecutive rows of a table."""

    columns: Any
    """A pyarrow RecordBatch."""
    file: str
    """Path of the file, or name of the dataset."""
    first: int
    """Number of its first row in the file."""

    def name(self, row: int) -> str:
        """Return the name that errors use for a row of the batch."""
        return f"{self.file}:{self.first + row}"


def read_tables(
    source: str,
    *,
    split: str,
    only: Sequence[str] = (),
    max_bytes: int | None = None,
    number_bytes: int = PYTHON_NUMBER,
) -> Iterator[Batch]:
    """Read a source of one of the kinds `TABLES`, in batches of `BATCH_BYTES` bytes at most, or of one row.

    Args:
      only: columns to read, of those that the table has; if it has none of them, all are read.
      max_bytes: most bytes of a row, besides the `RECORD_BYTES` that any may have; None: no limit.
      number_bytes: fewest bytes that a number within a row counts for; 0: its own.

    Raises ValueError for a file that is damaged, and for a row beyond the limit, which is not read.
    """
    limit = row_limit(max_bytes, number_bytes)
    name = _dataset_name(source)
    if name is not None:
        yield from _dataset(name, split, only, limit, max_bytes)
        return
    kind, _, _ = source.partition(":")
    read = _parquet if kind == "parquet" else _arrow
    for path in files_of(source):
        first = 0
        for columns in read(path, only, limit, max_bytes):
            yield Batch(columns, str(path), first)
            first += len(columns)


def pinned(source: str) -> str | None:
    """Return the name of a dataset of the hub with its commit, hf://ORGANISATION/NAME@COMMIT; None for others."""
    name = _dataset_name(source)
    if name is None or not on_hub(name):
        return None
    return snapshot(name, kind="dataset").name


def _dataset_name(source: str) -> str | None:
    """Return the name or path of the dataset that a source is; None for files."""
    kind, _, where = source.partition(":")
    return {"datasets": where, "hf": source}.get(kind)


def _chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the columns of a table to read; empty if it has none of `only`."""
    return [name for name in names if name in only]


def _parquet(path: Path, only: Sequence[str], limit: RowLimit, max_bytes: int | None) -> Iterator[Any]:
    with needed_for("a parquet: source"):
        from pyarrow import parquet

    row = 0
    with _faults(path, "a parquet file", max_bytes, lambda: row), path.open("rb") as file:
        groups = row_groups(file)
        coded = coded_texts(file, groups)
        with parquet.ParquetFile(path, read_dictionary=coded, buffer_size=BUFFER_BYTES) as table:
            chosen = _chosen(table.schema_arrow.names, only) or table.schema_arrow.names
            for i, group in enumerate(groups):
                rows = batch_rows(file, group, chosen, coded, limit, max_bytes)
                for batch in table.iter_batches(rows, row_groups=[i], columns=chosen):
                    for piece in _pieces(batch, limit):
                        yield piece
                        row += len(piece)


def _pieces(batch: Any, limit: RowLimit) -> Iterator[Any]:
    """Yield the rows of a RecordBatch, at most `BATCH_BYTES` bytes or one row at a time."""
    batch.validate(full=True)
    sizes = np.full(len(batch), VALUE_BYTES, np.int64)
    for column in batch.columns:
        sizes += array_sizes(column, limit)
    first = 0
    while first < len(batch):
        rows = limit.fitting(sizes[first:])
        yield _without_dictionaries(batch.slice(first, rows))
        first += rows


def _without_dictionaries(batch: Any) -> Any:
    """Return a RecordBatch with copies of the values of dictionaries in its columns."""
    import pyarrow

    columns = []
    for column in batch.columns:
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary.take(column.indices)
        columns.append(column)
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _arrow(path: Path, only: Sequence[str], limit: RowLimit, max_bytes: int | None) -> Iterator[Any]:
    with needed_for("an arrow: source"):
        import pyarrow  # noqa: F401

    row = 0
    with _faults(path, "an Arrow file", max_bytes, lambda: row), path.open("rb") as file:
        for batch in ArrowReader(path, file, lambda names: _chosen(names, only), limit):
            yield batch
            row += len(batch)


@contextmanager
def _faults(path: Path | str, kind: str, max_bytes: int | None, row: Callable[[], int]) -> Iterator[None]:
    """Name the file and the row in errors of its content.

    Args:
      kind: what the file should be.
      row: returns the number of the row that is being read.
    """
    import pyarrow

    try:
        yield
    except RowTooLarge as fault:
        what = "bytes in memory"
        if fault.args:
            what = f"bytes: it is, or follows before, {fault}"
        raise too_large(f"{path}:{row()}", max_bytes or 0, what) from None
    except (Damaged, pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        place = f"row {row()} or one behind it: " if row() else ""
        raise ValueError(f"{path} is not {kind}, or it is damaged: {place}{reason}") from None


def _dataset(name: str, split: str, only: Sequence[str], limit: RowLimit, max_bytes: int | None) -> Iterator[Batch]:
    if not on_hub(name) and not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}; a dataset of the hub is hf://ORGANISATION/NAME")
    folder = local(name, kind="dataset")
    row = 0
    for columns in _rows_of_dataset(name, folder, split, only, limit, max_bytes):
        yield Batch(columns, name, row)
        row += len(columns)


def _rows_of_dataset(
    name: str, folder: Path, split: str, only: Sequence[str], limit: RowLimit, max_bytes: int | None
) -> Iterator[Any]:
    if (folder / "dataset_dict.json").is_file():
        splits = _json_of(folder / "dataset_dict.json", name)["splits"]
        if split not in splits:
            raise ValueError(f"dataset {name} has no split {split!r}; it has: {', '.join(splits)}")
        folder /= split
    if (folder / "state.json").is_file():
        # `datasets` would map the files, and a damaged one would end the process.
        for file in _json_of(folder / "state.json", name)["_data_files"]:
            yield from _arrow(folder / file["filename"], only, limit, max_bytes)
        return
    dataset = _load_dataset(name, folder, split)
    dataset = dataset.select_columns(_chosen(dataset.column_names, only) or dataset.column_names)
    row = 0
    with _faults(name, "a dataset", max_bytes, lambda: row):
        for table in dataset.with_format("arrow").iter(MOST_ROWS):
            for batch in table.to_batches():
                for piece in _pieces(batch, limit):
                    yield piece
                    row += len(piece)


def _json_of(path: Path, name: str) -> dict[str, Any]:
    """Read a file of a dataset that `save_to_disk` wrote."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"dataset {name} cannot be read: {path} is not JSON: {error}") from None


def _load_dataset(name: str, folder: Path, split: str):
    with needed_for("a datasets: source"):
        import datasets  # slow to import

    try:
        return datasets.load_dataset(str(folder), split=split)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(f"dataset {name} cannot be read: {str(error.__cause__ or error).splitlines()[0]}") from None
