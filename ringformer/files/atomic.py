"""Small files that are there whole or not at all, after a crash of the process or of the machine."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringformer.files.hashes import hash_object

CHECKSUM = "ringformer_checksum"
"""The key of an object's own hash; a stranger's file has another meaning of none."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one piece: who reads meanwhile, or after a crash, finds the old content or the new.

    What is written waits for the disk beside it, as PATH.part. One process at a time may write a path.
    """
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object in one piece, with its checksum, which `untrusted.read_object` compares."""
    values = json.loads(json.dumps(values))
    write_whole(path, json.dumps({**values, CHECKSUM: hash_object(values)}, indent=1) + "\n")


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, and wait for the disk."""
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait for the disk to have a file's content, or a folder's entries: without these a rename may be lost with the
    machine's power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_back(path: Path) -> bytes:
    """Wait for the disk to have a file, and return the content that the disk has: the pages in memory are dropped."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.readall()
