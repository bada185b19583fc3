"""Readings of files with flipped bytes in another process: `python -m tests.data.sources.flips STEP FILE ...`."""

import sys
from pathlib import Path

from ringformer.data.sources.records import _table_rows, read_rows
from ringformer.data.sources.row_sizes import Wanted
from ringformer.data.sources.table_process import TableProcess
from ringformer.data.sources.tables import Batch

FLIPS = (1, 0x80, 0xFF)
LIMIT = 2**20


class Reader:
    """Reads files as records and, if they are tables, in one process as long as it lives."""

    def __init__(self) -> None:
        self._process = TableProcess().__enter__()
        self.ends = 0
        """Number of processes that a table has ended."""

    def read(self, path: Path) -> str:
        """Read a file. Return the error, if it has one."""
        kind = path.suffix.lstrip(".")
        try:
            if kind in ("arrow", "parquet"):
                batches = self._process.read(path, kind, Wanted(max_bytes=LIMIT))
                rows = _table_rows((Batch(batch, str(path), 0) for batch in batches), ())
            else:
                if kind in ("gz", "zst"):
                    kind = "jsonl"
                rows = read_rows(f"{kind}:{path}", max_bytes=LIMIT)
            for _ in rows:
                pass
        except ValueError as error:
            if "it ends the process that reads it" in str(error):
                self.ends += 1
                self._process.__exit__()
                self._process = TableProcess().__enter__()
            return str(error)
        return ""


def flip_all(reader: Reader, path: Path, step: int) -> None:
    """Flip bytes one after the other; each reading ends, and its error has one line with the file's name."""
    whole = path.read_bytes()
    for place in range(0, len(whole), step):
        for flip in FLIPS:
            content = bytearray(whole)
            content[place] ^= flip
            path.write_bytes(content)
            try:
                error = reader.read(path)
            except BaseException:
                print(f"byte {place} of {len(whole)}, flipped by {flip:#x}", file=sys.stderr)
                raise
            if error and (str(path) not in error or "\n" in error.split(" still to be read")[0]):
                raise AssertionError(f"byte {place} of {len(whole)}, flipped by {flip:#x}: {error}")


if __name__ == "__main__":
    reader = Reader()
    for name in sys.argv[2:]:
        assert not reader.read(Path(name)), reader.read(Path(name))
        flip_all(reader, Path(name), int(sys.argv[1]))
    print(f"{reader.ends} processes ended")
