"""Creation of a folder that is complete or absent, whatever ends the process that writes it.

FOLDER is built in FOLDER.building-XXXXXXXX, beside a note of the building process, and renamed once everything is on
disk. If a building process is killed, the next one that builds there removes the leftovers.
"""

import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ringformer.files.atomic import naming, sync
from ringformer.files.json_text import parse_json
from ringformer.files.output_place import check_output
from ringformer.files.process_identity import began, machine

BUILDER = "builder.json"
ABANDONED = 24 * 3600.0
"""Seconds without a change after which the folder of a process on another host counts as abandoned; whether that
process still runs cannot be checked."""


@contextmanager
def new_folder(place: Path, flag: str) -> Iterator[Path]:
    """Yield a folder to build in, which becomes `place` at the end of the block and is removed after an error.

    Args:
      flag: option that names the place, for errors.

    Raises ValueError like `check_output`, and OSError, which names `place`, if the disk is full or `place` is not empty
    by the end.
    """
    check_output(place, flag)
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    temporary = place.parent / f"{place.name}.building-{uuid.uuid4().hex[:8]}"
    building = temporary / place.name
    try:
        temporary.mkdir()
        (temporary / BUILDER).write_text(json.dumps(this_process()))
        building.mkdir()
        with naming(place):
            yield building
        for path in (*building.rglob("*"), building):
            sync(path)
        building.rename(place)
        sync(place.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def this_process() -> dict[str, Any]:
    """Return the note of this process."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": machine(), "pid": pid, "began": began(pid)}


def _remove_leftovers(place: Path) -> None:
    pattern = re.compile(re.escape(place.name) + r"\.building-[0-9a-f]{8}")
    for folder in place.parent.iterdir():
        if pattern.fullmatch(folder.name) and folder.is_dir() and not _is_being_built(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_being_built(folder: Path) -> bool:
    builder: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # the builder was killed before writing it
        builder = parse_json((folder / BUILDER).read_text())
    if machine() and builder.get("machine") == machine():
        return began(builder["pid"]) == builder["began"]
    changed = [path.stat().st_mtime for path in (folder, *folder.rglob("*")) if path.exists()]
    return time.time() - max(changed, default=0.0) < ABANDONED
