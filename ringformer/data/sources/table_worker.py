"""Reading of tables in a process of its own (`table_process.py`), whose memory is limited.

A table may be damaged so that it ends the process that reads it, and a small one may unpack to more than any memory.

Requests come on stdin, one JSON object a line. The answer is a line {"rows": true}, an Arrow stream of the rows, and a
line that says how it ended: {}, or with "fault" and "reason" if the table was not read to its end. A table without rows
is answered by the last line alone.
"""

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from ringformer.data.sources.row_sizes import BATCH_BYTES, VALUE_BYTES, RowLimit, RowTooLarge, Wanted, array_sizes
from ringformer.data.sources.table_process import DAMAGED, REFUSED, TOO_LARGE, TOO_MUCH_MEMORY, Request

MOST_ROWS = 2**13
"""Most rows that are read together."""
BUFFER_BYTES = 2**20
"""Bytes of a Parquet column to read at a time."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Refused(ValueError):
    """A table whose columns cannot be read, with the reason."""


def main() -> None:
    """Answer requests until stdin ends."""
    sys.meta_path.insert(0, _NoPandas())
    pyarrow.set_cpu_count(1)
    _load_code()
    allocated_before = _allocated()
    out = pyarrow.PythonFile(sys.stdout.buffer, "w")
    for line in sys.stdin:
        request = Request(**json.loads(line))
        _limit_memory(allocated_before, request.memory)
        _answer(request, out)
        out.flush()


class _NoPandas(MetaPathFinder):
    """Finder that lets pyarrow take pandas, which it would import, for absent: it takes time and memory."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(name=fullname)


def _load_code() -> None:
    """Read a small table, so that all code is in memory before memory is limited."""
    columns = {"text": ["a", "b"], "tokens": [[1], [2]], "turns": [[{"role": "a"}], []]}
    table = pyarrow.table(columns)
    with BytesIO() as file:
        parquet.write_table(table, file)
        file.seek(0)
        for batch in parquet.ParquetFile(file, read_dictionary=["text"]).iter_batches(use_threads=False):
            for rows in pieces(batch, Wanted().limit):
                with pyarrow.ipc.new_stream(BytesIO(), rows.schema) as stream:
                    stream.write_batch(rows)


def _answer(request: Request, out: Any) -> None:
    stream = None
    ended: dict[str, str] = {}
    try:
        for rows in _read(request):
            if stream is None:
                _check_names(rows.schema)
                out.write(b'{"rows": true}\n')
                stream = pyarrow.ipc.new_stream(out, rows.schema)
            stream.write_batch(rows)
    except RowTooLarge:
        ended["fault"] = TOO_LARGE
    except MemoryError:
        ended["fault"] = TOO_MUCH_MEMORY
    except Refused as error:
        ended |= {"fault": REFUSED, "reason": str(error)}
    except Exception as error:  # whatever a library makes of wrong bytes
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        ended |= {"fault": DAMAGED, "reason": first_line}
        if "bad_alloc" in first_line or "malloc" in first_line:
            ended["fault"] = TOO_MUCH_MEMORY
    if stream is not None:
        stream.close()
    out.write(json.dumps(ended).encode() + b"\n")


def _check_names(fields: Iterable[pyarrow.Field]) -> None:
    """Raise UnicodeDecodeError for a column, or a field within one, whose name is not UTF-8."""
    for field in fields:
        assert isinstance(field.name, str)
        _check_names(field.type.field(i) for i in range(field.type.num_fields))


def _read(request: Request) -> Iterator[pyarrow.RecordBatch]:
    read = {"parquet": _parquet, "arrow": _arrow}[request.kind]
    limit = RowLimit(*request.limit)
    for batch in read(request.path, request.only):
        yield from pieces(batch, limit)


def pieces(batch: pyarrow.RecordBatch, limit: RowLimit) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a batch, at most `BATCH_BYTES` bytes or one row at a time, without dictionaries of columns.

    Raises RowTooLarge for a row beyond the limit, and pyarrow's ArrowInvalid for a batch that is damaged.
    """
    batch.validate(full=True)
    sizes = np.full(len(batch), VALUE_BYTES, np.int64)
    for column in batch.columns:
        sizes += array_sizes(column, limit)
    first = 0
    while first < len(batch):
        rows = limit.fitting(sizes[first:])
        yield _without_dictionaries(batch.slice(first, rows))
        first += rows


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the columns of a table to read: those of `only`, or all. Raises Refused if one is there twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise Refused(f"has {count} columns {name!r}: rename all but one")
    return [name for name in names if name in only] or list(names)


def _without_dictionaries(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    columns = []
    for column in batch.columns:
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary.take(column.indices)
        columns.append(column)
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _parquet(path: str, only: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    with parquet.ParquetFile(path) as table:
        metadata = table.metadata
    with parquet.ParquetFile(path, read_dictionary=_coded(metadata), buffer_size=BUFFER_BYTES) as table:
        columns = chosen(table.schema_arrow.names, only)
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            rows = BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
            rows = max(1, min(MOST_ROWS, rows))
            yield from table.iter_batches(rows, row_groups=[i], columns=columns, use_threads=False)


def _coded(metadata: Any) -> list[str]:
    """Return the paths of columns of texts whose values are numbers of a dictionary, in some row group. They are read
    as such: a text that is in many rows is in memory once."""
    is_coded: dict[str, bool] = {}
    for i in range(metadata.num_row_groups):
        for j in range(metadata.num_columns):
            column = metadata.row_group(i).column(j)
            encodings = " ".join(column.encodings)
            if column.physical_type == "BYTE_ARRAY" and "DICTIONARY" in encodings:
                is_coded.setdefault(column.path_in_schema, True)
            if "DELTA" in encodings:  # pyarrow reads none of them as numbers of a dictionary
                is_coded[column.path_in_schema] = False
    return [path for path, coded in is_coded.items() if coded]


def _arrow(path: str, only: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        if not is_file:
            file.seek(max(file.size() - len(END_OF_STREAM), 0))
            if file.read() != END_OF_STREAM:
                raise OSError("the stream does not end, it was cut")
        opened = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        file.seek(0)
        names = opened(file).schema.names
        indices = [names.index(name) for name in chosen(names, only)]
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=indices)
        file.seek(0)
        table = opened(file, options=options)
        if is_file:
            for i in range(table.num_record_batches):
                yield table.get_batch(i)
        else:
            yield from table


def _allocated() -> int:
    """Return the bytes of memory that this process has for its data; 0 where Linux does not tell."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "VmData":
                return 1024 * int(value.split()[0])
    return 0


def _limit_memory(before: int, more: int | None) -> None:
    """Let this process allocate `more` bytes than it had `before`, on Linux; None: any number."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = hard
    if before and more is not None:
        limit = before + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    main()
