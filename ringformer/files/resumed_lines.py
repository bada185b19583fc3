"""A file of JSON lines that a command writes one by one, and goes on with when it is run again.

Beside FILE stands FILE.made_by.json, which names the command and the settings that decide what the lines say. A file
without it is somebody else's, and is never changed; nor are lines that were written with other settings.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ringformer.files.atomic import naming, write_object
from ringformer.files.untrusted import read_object

MADE_BY = ".made_by.json"


class ResumedLines:
    """Lines of an open file that this process alone writes."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path = path
        self._file = file
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.lines: list[bytes] = whole.splitlines(keepends=True)
        """Whole lines that were there. A killed process may have written a part of another, which the next line
        replaces."""
        self._size = len(whole)

    def append(self, line: str) -> None:
        """Append a line, and wait until it is on the disk."""
        with naming(self.path):
            self._file.truncate(self._size)
            self._file.seek(self._size)
            self._size += self._file.write(line.encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def resumed_lines(path: Path, command: str, settings: Mapping[str, Any]) -> Iterator[ResumedLines]:
    """Open the lines of a file, to go on behind them. The file is locked meanwhile.

    Args:
      command: what writes the file.
      settings: what decides the lines, besides what each answers; a JSON object.

    Raises ValueError, and changes no byte of the file, if another process writes it, if it has content that this
    command did not write, or that was written with other settings.
    """
    existed = path.exists()
    if existed and not path.is_file():
        raise ValueError(f"{path} is no regular file, whose lines could be read again: choose another --out")
    try:
        file = path.open("r+b" if existed else "x+b")
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): choose another --out") from None
    with file:
        lock(file, path)
        _take(path, command, settings)
        yield ResumedLines(path, file)


def lock(file: IO[Any], path: Path) -> None:
    """Lock an open file until it is closed. Raises ValueError if another process writes `path`, for which it stands."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process writes {path}: wait for it, or choose another --out") from None


def _take(path: Path, command: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the file is not this command's, or has other settings; record them for an empty file."""
    record = path.with_name(path.name + MADE_BY)
    own = {"command": command, "settings": json.loads(json.dumps(settings))}
    is_empty = path.stat().st_size == 0
    if not is_empty and not record.exists():
        raise ValueError(f"{path} was not written by {command}, there is no {record.name}: choose another --out")
    made_by = read_object(record.parent, record.name, "choose another --out") if record.exists() else own
    if made_by.get("command") != command:
        raise ValueError(f"{record} says that {path} is of {made_by.get('command')}: choose another --out")
    if is_empty:
        write_object(record, own)
        return
    settings_before = made_by.get("settings")
    if type(settings_before) is not dict:
        raise ValueError(f"{record} has no settings: choose another --out")
    changes = differences(settings_before, own["settings"])
    if changes:
        raise ValueError(f"{path} was written with other settings: {'; '.join(changes)}; choose another --out")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say of each setting that differs what it was and what it is."""
    changes = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            changes.append(f"{name} is {old.get(name)!r}, not {new.get(name)!r}")
    return changes
