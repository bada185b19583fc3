"""Sources that are tables: Parquet and Arrow files, and Hugging Face datasets, read as batches of Arrow columns."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.data.optional_packages import needed_for
from ringformer.data.sources.row_sizes import RowTooLarge, Wanted
from ringformer.data.sources.source_files import files_of
from ringformer.data.sources.table_process import TableProcess
from ringformer.data.sources.text_files import too_large
from ringformer.files.hub import local, on_hub, snapshot
from ringformer.files.untrusted import contained, read_object

TABLES = ("parquet", "arrow", "datasets", "hf")
"""Kinds of source that are tables."""
SPLITS = "dataset_dict.json"
STATE = "state.json"
"""Files of a dataset that `save_to_disk` wrote."""


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


def read_tables(source: str, *, split: str, wanted: Wanted) -> Iterator[Batch]:
    """Read a source of one of the kinds `TABLES`, in batches of `BATCH_BYTES` bytes at most, or of one row.

    Raises ValueError for a file that is damaged, for a row beyond the limit, which is not read, and for a file that
    unpacks to too much memory.
    """
    kind, _, _ = source.partition(":")
    with needed_for(f"a {kind}: source"):
        import pyarrow  # noqa: F401
    name = _dataset_name(source)
    with TableProcess() as process:
        if name is not None:
            yield from _numbered(_dataset(name, split, wanted, process), name)
            return
        for path in files_of(source):
            yield from _numbered(process.read(path, kind, wanted), str(path))


def _numbered(rows: Iterable[Any], file: str) -> Iterator[Batch]:
    """Number the rows of a file, or of a dataset."""
    first = 0
    for columns in rows:
        yield Batch(columns, file, first)
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


def _dataset(name: str, split: str, wanted: Wanted, process: TableProcess) -> Iterator[Any]:
    """Yield the rows of a dataset. The library `datasets` would map the files that `save_to_disk` wrote, and a damaged
    one would end this process: they are read as any Arrow file."""
    if not on_hub(name) and not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}; a dataset of the hub is hf://ORGANISATION/NAME")
    folder = local(name, kind="dataset")
    if (folder / SPLITS).is_file():
        splits = read_object(folder, SPLITS).get("splits") or []
        if split not in splits:
            raise ValueError(f"dataset {name} has no split {split!r}; it has: {', '.join(map(str, splits))}")
        folder = contained(folder, split)
    if not (folder / STATE).is_file():
        yield from _loaded(name, folder, split, wanted)
        return
    try:
        names = [file["filename"] for file in read_object(folder, STATE)["_data_files"]]
    except (LookupError, TypeError):
        raise ValueError(f"dataset {name} cannot be read: {folder / STATE} names no files: save it again") from None
    for name_of_file in names:
        yield from process.read(contained(folder, name_of_file), "arrow", wanted)


def _loaded(name: str, folder: Path, split: str, wanted: Wanted) -> Iterator[Any]:
    """Yield the rows of a dataset that the library `datasets` reads."""
    with needed_for("a datasets: source"):
        import datasets  # slow to import

    from ringformer.data.sources.table_worker import MOST_ROWS, Refused, chosen, pieces

    row = 0
    try:
        dataset = datasets.load_dataset(str(folder), split=split)
        dataset = dataset.select_columns(chosen(dataset.column_names, wanted.only))
        for table in dataset.with_format("arrow").iter(MOST_ROWS):
            for batch in table.to_batches():
                for rows in pieces(batch, wanted.limit):
                    yield rows
                    row += len(rows)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(f"dataset {name} cannot be read: {str(error.__cause__ or error).splitlines()[0]}") from None
    except Refused as error:
        raise ValueError(f"dataset {name} {error}") from None
    except RowTooLarge:
        raise too_large(f"{name}:{row}", wanted.max_bytes or 0, "bytes in memory") from None
