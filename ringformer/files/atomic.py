"""Small files that are either complete or absent, even after a crash of the process or of the machine."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringformer.files.hashes import hash_object

CHECKSUM = "ringformer_checksum"
"""Key under which a JSON object holds its own hash; no other program uses this key."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context for writing `path`: an error of the system that names no file, such as that of a full disk, names it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader finds either the old or the new content, even after a crash.

    The content is first written to PATH.part, which is renamed once it is on the disk. Only one process at a time may
    write a path.
    """
    part = path.with_name(f"{path.name}.part")
    with naming(path):
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(part)
        part.replace(path)
        sync(path.parent)


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with its checksum, which `untrusted.read_object` verifies."""
    values = json.loads(json.dumps(values))
    write_whole(path, json.dumps({**values, CHECKSUM: hash_object(values)}, indent=1) + "\n")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, and wait until it is on the disk."""
    with naming(path), path.open("a") as file:
        file.write(line + "\n")
    sync(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk. Unless the folder is synced, a power failure
    may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_back(path: Path) -> bytes:
    """Wait until a file is on the disk, drop its pages from memory, and return its content as read from the disk."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.readall()
