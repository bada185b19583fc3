"""The process that reads tables (`table_worker.py`), and what it answers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple, Self

from ringformer.data.sources.row_sizes import Wanted
from ringformer.data.sources.text_files import too_large

SPARE_BYTES = 2**24
"""Memory to read a table with, besides that of two documents."""
TIMES_SIZE = 16
"""A table may also take so many times its size on the disk: as compressed, with copies of what is read together."""
WORKER = Path(__file__).with_name("table_worker.py")
START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)
"""Program of the process."""


TOO_LARGE = "too large"
TOO_MUCH_MEMORY = "too much memory"
DAMAGED = "damaged"
REFUSED = "refused"
"""Faults: a row beyond the limit, content that unpacks to too much, bytes that are wrong, columns that are."""


class Request(NamedTuple):
    """A table to read."""

    path: str
    kind: str
    """parquet or arrow."""
    only: list[str]
    limit: list[int]
    """Fields of `RowLimit`."""
    memory: int | None
    """Bytes that may be allocated for it; None: any number."""


ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of the process: it has one thread, takes memory when it needs it, and gives large arrays back at once."""


class TableProcess:
    """A process that reads tables; a context, at whose end it ends. It also ends with its parent."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(sys.path), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
            process_group=0,  # shields it from Ctrl-C, which its parent answers
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def read(self, path: Path, kind: str, wanted: Wanted) -> Iterator[Any]:
        """Yield the rows of a table as pyarrow RecordBatches, a few MiB or one row at a time.

        Args:
          kind: parquet or arrow.

        Raises ValueError for a table that is damaged, has a row beyond the limit, or takes too much memory.
        """
        import pyarrow

        memory = None
        if wanted.max_bytes is not None:
            memory = 2 * wanted.max_bytes + SPARE_BYTES + TIMES_SIZE * path.stat().st_size
        request = Request(str(path), kind, list(wanted.only), list(astuple(wanted.limit)), memory)
        row = 0
        ended: dict[str, Any] = {"fault": DAMAGED, "reason": "it ends the process that reads it"}
        with suppress(EOFError, OSError, pyarrow.ArrowInvalid):  # of a process that ended
            self._send(request)
            answer = self._receive()
            if answer.get("rows"):
                for batch in pyarrow.ipc.open_stream(self._process.stdout):
                    yield batch
                    row += len(batch)
                answer = self._receive()
            ended = answer
        if "fault" in ended:
            raise _error(ended, row, request, wanted)

    def _send(self, request: Request) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request._asdict()).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        """Receive a line. Raises EOFError if the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def _error(ended: dict[str, Any], row: int, request: Request, wanted: Wanted) -> ValueError:
    """Return the error of a table that was not read to its end."""
    fault = ended["fault"]
    path = request.path
    if fault == REFUSED:
        return ValueError(f"{path} {ended['reason']}")
    if fault == TOO_LARGE:
        return too_large(f"{path}:{row}", wanted.max_bytes or 0, "bytes in memory")
    if fault == TOO_MUCH_MEMORY:
        what = f"bytes: what is read together there takes more than {request.memory:,} bytes of memory"
        return too_large(f"{path}:{row}", wanted.max_bytes or 0, what)
    name = {"parquet": "a parquet file", "arrow": "an Arrow file"}[request.kind]
    place = f"row {row} or one behind it: " if row else ""
    return ValueError(f"{path} is not {name}, or it is damaged: {place}{ended['reason']}")
