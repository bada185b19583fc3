"""Places for outputs: refused before any work if nothing can be kept there, or if something would be lost."""

import os
import re
from pathlib import Path

from ringformer.files.run_layout import CHECKPOINTS, CONFIG, IDENTITY, METRICS

SYSTEM = Path("/proc"), Path("/sys")
"""Folders that show the system, and keep no files."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the names of folders that the checkpoint library deletes as leftovers."""


def check_output(place: str | Path, flag: str) -> Path:
    """Return the path of a file or folder to write.

    Args:
      flag: option that names it, for errors.

    Raises ValueError for an empty name, one that is not UTF-8, a URL, a folder that keeps no files, a place inside a
    run's checkpoints or among the checkpoint library's leftovers, and one below a file or a folder that cannot be
    written to.
    """
    named = f"{flag}={place}"
    if not str(place):
        raise ValueError(f"{flag}= names no place: name one")
    if re.match(r"[a-z0-9]+:/", str(place)):
        raise ValueError(f"{named} is no folder: mount the bucket, or write to a disk and copy it")
    if re.search("[\0\ud800-\udfff]", str(place)):
        raise ValueError(f"{named} is not UTF-8, or has a NUL: choose another name")
    path = Path(place)
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        if folder in SYSTEM:
            raise ValueError(f"{named}: {folder} keeps no files; choose another place")
        if TEMPORARY in folder.name:
            raise ValueError(f"{named}: what is named {TEMPORARY} is deleted as a leftover; choose another name")
        if folder.name == CHECKPOINTS and any((folder.parent / name).is_file() for name in (CONFIG, METRICS, IDENTITY)):
            raise ValueError(f"{named} is among the checkpoints of the run {folder.parent}; choose another place")
    for folder in absolute.parents:
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ValueError(f"{named}: the folder {folder} cannot be written to; choose another place")
            break
        if os.path.lexists(folder):
            raise ValueError(f"{named}: {folder} is not a folder; choose another place")
    return path
