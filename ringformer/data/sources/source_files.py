"""Names of sources, and their files.

    stdlib                  the .py files of the running Python's standard library, in order of relative path
    text:PATTERN            one document per file; the glob pattern may contain **
    jsonl:PATTERN           one JSON object per line
    json:PATTERN            one array of JSON objects per file
    parquet:PATTERN         Parquet files, one record per row
    arrow:PATTERN           Arrow IPC files or streams, as `datasets` writes them, one record per row
    datasets:NAME_OR_PATH   a dataset of the hub, or a folder made by `save_to_disk`
    hf://NAME               a dataset of the hub, downloaded first (`files/hub.py`)

Files of text and JSON may be compressed, as .gz or .zst.
"""

import glob
import gzip
import io
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from ringformer.data.optional_packages import needed_for

KINDS = (
    "stdlib",
    "text:PATTERN",
    "jsonl:PATTERN",
    "json:PATTERN",
    "parquet:PATTERN",
    "arrow:PATTERN",
    "datasets:NAME_OR_PATH",
    "hf://NAME",
)

STDLIB_EXCLUDED = frozenset({"site-packages", "test", "idlelib", "__pycache__"})
"""Folders of the standard library to skip."""


def source_files(source: str) -> dict[str, Path]:
    """Return the files of `source` by name, to detect changes; empty for a dataset of the hub, or if the files are
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


def files_of(source: str) -> list[Path]:
    """Return the files that the pattern of `source` matches. Raises FileNotFoundError if there are none."""
    pattern = source.partition(":")[2]
    files = list(source_files(source).values())
    if not files:
        hint = f"; it is a folder: did you mean {pattern.rstrip('/')}/**/*?" if Path(pattern).is_dir() else ""
        raise FileNotFoundError(f"no file matches {pattern!r} of source {source!r}{hint}")
    return files


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if its name ends in .gz or .zst.

    Raises ValueError, also while it is read, if a compressed file is truncated or damaged.
    """
    try:
        if path.suffix in (".gz", ".zst") and not path.stat().st_size:
            raise EOFError("it is empty")
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as unpacked:
                yield cast(IO[bytes], unpacked)
        elif path.suffix == ".zst":
            with needed_for("a .zst file"):
                import pyarrow

            with pyarrow.input_stream(str(path), compression="zstd") as stream:
                yield io.BufferedReader(stream)
        else:
            with path.open("rb") as file:
                yield file
    except (EOFError, zlib.error, OSError) as error:
        if path.suffix not in (".gz", ".zst") or (isinstance(error, OSError) and error.errno):
            raise
        raise ValueError(f"{path} is truncated or damaged ({error}): download or compress it again") from None
