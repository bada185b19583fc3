"""Detection of changes to the files that a store was made from."""

import hashlib
from pathlib import Path
from typing import Any

from ringformer.data.sources.source_files import source_files


def source_state(source: str) -> dict[str, list[Any]]:
    """Return [size, modification time in ns, hash of the content] of each file of `source`."""
    return {name: [*_stat(path), _digest(path)] for name, path in source_files(source).items()}


def changed_files(source: str, recorded: dict[str, list[Any]]) -> list[str]:
    """Describe the files that now differ from `recorded`; empty if the whole source is gone.

    A file is read only if its size is unchanged but its modification time has changed.
    """
    now = source_files(source)
    if not now:
        return []
    changes = [f"{name} is new" for name in now if name not in recorded]
    for name, (size, time, digest) in recorded.items():
        if name not in now:
            changes.append(f"{name} is gone")
        elif _stat(now[name]) != [size, time] and (now[name].stat().st_size != size or _digest(now[name]) != digest):
            changes.append(f"{name} has changed")
    return changes


def _stat(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
