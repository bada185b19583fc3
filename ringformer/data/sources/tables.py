"""Sources that are tables: Parquet and Arrow files, and Hugging Face datasets, read as batches of Arrow columns."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.optional_packages import needed_for
from ringformer.data.sources.source_files import files_of
from ringformer.files.hub import local, on_hub, snapshot
from ringformer.files.untrusted import contained_files, read_object

TABLES = ("parquet", "arrow", "datasets", "hf")
"""Kinds of source that are tables."""

MOST_ROWS = 1024
MOST_BYTES = 2**25
"""Most rows of a batch and, if rows are larger, about the most bytes."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream."""


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


def read_tables(source: str, *, split: str, only: Sequence[str] = ()) -> Iterator[Batch]:
    """Read a source of one of the kinds `TABLES`.

    Args:
      only: columns to read, of those that the table has; if it has none of them, all are read.
    """
    name = _dataset_name(source)
    if name is not None:
        yield from _dataset(name, split, only)
        return
    kind, _, _ = source.partition(":")
    read = _parquet if kind == "parquet" else _arrow
    for path in files_of(source):
        first = 0
        for columns in read(path, only):
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


def _chosen(names: Sequence[str], only: Sequence[str], file: str) -> list[str]:
    """Return the columns of a table to read; empty if it has none of `only`. Raises ValueError if it has a column
    twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{file} has {count} columns {name!r}: rename all but one")
    return [name for name in names if name in only]


def _batch_rows(rows: int, size: int) -> int:
    """Return the rows of a batch of a table with so many rows and bytes."""
    return max(1, min(MOST_ROWS, MOST_BYTES * rows // max(size, 1)))


def _parquet(path: Path, only: Sequence[str]) -> Iterator[Any]:
    with needed_for("a parquet: source"):
        import pyarrow
        from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            size = sum(table.metadata.row_group(i).total_byte_size for i in range(table.metadata.num_row_groups))
            rows = _batch_rows(table.metadata.num_rows, size)
            yield from table.iter_batches(rows, columns=_chosen(table.schema_arrow.names, only, str(path)) or None)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a parquet file, or it is damaged: {str(error).splitlines()[0]}") from None


def _arrow(path: Path, only: Sequence[str]) -> Iterator[Any]:
    with needed_for("an arrow: source"):
        import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                file.seek(max(file.size() - len(END_OF_STREAM), 0))
                if file.read() != END_OF_STREAM:
                    raise OSError("the stream does not end, it was cut")
                file.seek(0)
                batches = iter(pyarrow.ipc.open_stream(file))
            for batch in batches:
                columns = batch.select(_chosen(batch.schema.names, only, str(path)) or batch.schema.names)
                rows = _batch_rows(len(columns), columns.nbytes)
                for first in range(0, len(columns), rows):
                    yield columns.slice(first, rows)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not an Arrow file, or it is damaged: {str(error).splitlines()[0]}") from None


def _dataset(name: str, split: str, only: Sequence[str]) -> Iterator[Batch]:
    dataset = _load_dataset(name, split)
    dataset = dataset.select_columns(_chosen(dataset.column_names, only, name) or dataset.column_names)
    rows = _batch_rows(len(dataset), dataset.data.nbytes)
    first = 0
    for table in dataset.with_format("arrow").iter(rows):
        for columns in table.to_batches():
            yield Batch(columns, name, first)
            first += len(columns)


def _load_dataset(name: str, split: str):
    with needed_for("a datasets: source"):
        import datasets  # slow to import

    if not on_hub(name) and not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}; a dataset of the hub is hf://ORGANISATION/NAME")
    folder = local(name, kind="dataset")
    for record in contained_files(folder, ("dataset_dict.json", "state.json")):
        read_object(folder, record.name)  # refused in our words
    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(folder))
        if split not in splits:
            raise ValueError(f"dataset {name} has no split {split!r}; it has: {', '.join(splits)}")
        return splits[split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(str(folder))
    try:
        return datasets.load_dataset(str(folder), split=split)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(f"dataset {name} cannot be read: {str(error.__cause__ or error).splitlines()[0]}") from None
