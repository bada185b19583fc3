"""Names of sources, and their files.

    stdlib                  the .py files of the running Python's standard library, in order of relative path
    installed               those, and the .py files of the installed packages
    text:PATTERN            one document per file; the glob pattern may contain **; or text:FOLDER
    jsonl:PATTERN           one JSON object per line
    json:PATTERN            one array of JSON objects per file
    parquet:PATTERN         Parquet files, one record per row
    arrow:PATTERN           Arrow IPC files or streams, as `datasets` writes them, one record per row
    datasets:NAME_OR_PATH   a dataset of the hub, or a folder made by `save_to_disk`
    hf://NAME               a dataset of the hub, downloaded first (`files/hub.py`)

Files of text and JSON may be compressed, as .gz or .zst. In place of a pattern, a folder stands for its files and those
of the folders in it: for text all of them, for the other kinds those whose names end as the kind does. As with
patterns, names that begin with a dot are left out; links to folders are not followed.
"""

import glob
import gzip
import io
import os
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from ringformer.data.optional_packages import needed_for

INSTALLED = "installed"
KINDS = (
    "stdlib",
    INSTALLED,
    "text:PATTERN",
    "jsonl:PATTERN",
    "json:PATTERN",
    "parquet:PATTERN",
    "arrow:PATTERN",
    "datasets:NAME_OR_PATH",
    "hf://NAME",
)

SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
"""Ends of the names of a folder's files, by the kind of source; of JSON before .gz or .zst."""

STDLIB_EXCLUDED = frozenset({"site-packages", "test", "idlelib", "__pycache__"})
"""Folders of the standard library to skip."""


def source_files(source: str) -> dict[str, Path]:
    """Return the files of `source` by name, to detect changes; empty for a dataset of the hub, or if the files are
    gone.
    """
    kind, _, where = source.partition(":")
    if source == "stdlib":
        return _modules("stdlib", STDLIB_EXCLUDED)
    if source == INSTALLED:
        library = _modules("stdlib", STDLIB_EXCLUDED, prefix="stdlib/")
        packages = _modules("purelib", frozenset(), prefix="site-packages/")
        return library | packages
    if kind == "hf":
        return {}
    if kind == "datasets":
        names = list(map(str, sorted(Path(where).rglob("*"))))
    elif Path(where).is_dir():
        names = list(map(str, _files_in(Path(where), SUFFIXES.get(kind))))
    else:
        names = sorted(glob.glob(where, recursive=True))
    return {name: Path(name) for name in names if Path(name).is_file()}


def _modules(place: str, excluded: frozenset[str], prefix: str = "") -> dict[str, Path]:
    """Return the .py files in a place of `sysconfig.get_path` by relative path, in its order, after a prefix."""
    root = Path(sysconfig.get_path(place))
    names = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if excluded.isdisjoint(relative.parts[:-1]):
            names.append(relative.as_posix())
    return {f"{prefix}{name}": root / name for name in sorted(names)}


def _files_in(folder: Path, suffixes: tuple[str, ...] | None) -> list[Path]:
    """Return the files in a folder and the folders in it, in order of path; without suffixes, all of them."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            has_suffix = suffixes is None or uncompressed(name).endswith(suffixes)
            path = Path(parent, name)
            if has_suffix and not name.startswith(".") and path.is_file():
                files.append(path)
    return sorted(files, key=str)


def uncompressed(name: str) -> str:
    """Return the name of a file without the end .gz or .zst."""
    return name.removesuffix(".gz").removesuffix(".zst")


def files_of(source: str) -> list[Path]:
    """Return the files that the pattern of `source` matches. Raises FileNotFoundError if there are none."""
    kind, _, pattern = source.partition(":")
    files = list(source_files(source).values())
    if not files:
        message = f"no file matches {pattern!r} of source {source!r}"
        if Path(pattern).is_dir():
            ends = " or ".join(SUFFIXES.get(kind, ("any name",)))
            message += f": the folder has no file that ends in {ends}"
        raise FileNotFoundError(message)
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
