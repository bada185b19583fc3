"""Folder of prepared stores: it is either complete or absent, and its files are verified.

    DIR/train, DIR/eval   the stores (`token_store.py`)
    DIR/report.json       what was included and left out
    DIR/tokenizer         a copy of the tokenizer's files, if it has any
    DIR/source.json       size, time and hash of the source's files, to detect changes
    DIR/manifest.json     {file: [bytes, hash]} of all files, except those that a store.json lists

The folder is built in DIR.building-XXXXXXXX, with a note of the building process, and renamed once everything is on
disk. If a building process is killed, the next process that builds there removes the leftovers.
"""

import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ringformer.data.stores.checked_array import REBUILD
from ringformer.data.stores.integrity import check_files, read_meta
from ringformer.data.stores.token_store import TokenStore
from ringformer.files.atomic import sync
from ringformer.files.json_text import parse_json
from ringformer.files.manifest import MANIFEST, DamagedFiles, read_manifest, write_manifest
from ringformer.files.output_place import check_output
from ringformer.files.process_identity import began, machine

BUILDER = "builder.json"
ABANDONED = 24 * 3600.0
"""Seconds without a change after which the folder of a process on another host counts as abandoned; whether that
process still runs cannot be checked."""


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder to build in, which becomes `directory` at the end of the block and is removed after an error.

    Raises OSError if `directory` is not empty by then.
    """
    check_output(directory, "store")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    folder = directory.parent / f"{directory.name}.building-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / BUILDER).write_text(json.dumps(_this_process()))
        yield folder
        listed = [BUILDER]
        for path in folder.glob("*/store.json"):
            for name in read_meta(path)["files"]:
                listed.append(f"{path.parent.name}/{name}")
        write_manifest(folder, but=listed)
        for path in (*folder.rglob("*"), folder):
            sync(path)
        folder.rename(directory)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (directory / BUILDER).unlink()
    sync(directory.parent)


def check_folder(directory: Path) -> None:
    """Raise ValueError if a file of `directory` is missing or has changed; of each store, only store.json is
    checked."""
    try:
        manifest = read_manifest(directory)
    except DamagedFiles as error:
        raise ValueError(f"{error}: {REBUILD}") from None
    if manifest is None:
        raise ValueError(f"{directory / MANIFEST} is missing: {REBUILD}")
    check_files(directory, manifest)


def open_one(path: str | Path, names: Sequence[str]) -> TokenStore:
    """Open the store at `path` or, if `path` is a folder of stores, the first store of `names` that it has."""
    path = Path(path)
    for name in names:
        if (path / name).is_dir():
            check_folder(path)
            return TokenStore(path / name)
    if (path.parent / MANIFEST).is_file():
        check_folder(path.parent)
    return TokenStore(path)


def _remove_leftovers(directory: Path) -> None:
    pattern = re.compile(re.escape(directory.name) + r"\.building-[0-9a-f]{8}")
    for folder in directory.parent.iterdir():
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


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": machine(), "pid": pid, "began": began(pid)}
