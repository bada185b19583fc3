"""Folder with a saved tree of arrays. Orbax makes the folder, and a manifest lists all of its files
(`files/manifest.py`).

Each process makes the manifest's entries for the chunks that it wrote. Process 0 adds all other entries before Orbax
gives the folder its name.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ringformer.files.json_text import parse_json
from ringformer.files.manifest import (
    MANIFEST,
    DamagedFiles,
    Hashes,
    find_faults,
    read_manifest,
    read_verified,
    write_manifest,
)
from ringformer.hardware.absent_tpu import leave_absent_tpu_alone

leave_absent_tpu_alone()  # before a backend starts

TREE = "_METADATA"
"""Orbax's description of the tree."""
WRITTEN_LAST = ("commit_success.txt", "_CHECKPOINT_METADATA")
"""Files that Orbax writes after everything else; no restored value depends on them."""


class PlainFiles(ocp.PyTreeCheckpointHandler):
    """Handler of trees whose leaves are of one kind, each stored as a folder of plain zarr files; it writes a manifest.

    Args:
      kind: type of the leaves.
      handler: saves and restores them; in a save, each process calls `write_part`.
    """

    def __init__(self, kind: type, handler: ocp.type_handlers.TypeHandler):
        self.leaves = handler
        array = jax.Array, ocp.type_handlers.ArrayHandler()  # or Orbax warns that there is none
        kinds = ocp.type_handlers.create_type_handler_registry(array, (kind, handler))
        super().__init__(use_ocdbt=False, use_zarr3=True, type_handler_registry=kinds)

    def finalize(self, directory: Any) -> None:
        """Write the manifest. This runs on process 0, after all processes have written and before the folder gets its
        name. (Orbax's own method would merge the databases of the processes, and warn that there are none.)"""
        write_manifest(Path(directory), jax.process_count(), but=WRITTEN_LAST)


@ocp.args.register_with_handler(PlainFiles, for_save=True)
class Save(ocp.args.PyTreeSave):
    """Arguments with which `PlainFiles` saves a tree, and JSON values about the tree (`read_about`)."""

    def __init__(self, item: Any, about: dict[str, Any] | None = None):
        super().__init__(item, custom_metadata={"manifest": MANIFEST, "about": about or {}})


@ocp.args.register_with_handler(PlainFiles, for_restore=True)
class Restore(ocp.args.PyTreeRestore):
    """Arguments with which `PlainFiles` restores a tree."""


def read_about(folder: Path) -> dict[str, Any] | None:
    """Return the values that were saved with a tree (`Save`); None if the tree was saved before manifests were
    introduced.

    Raises DamagedFiles if the folder's metadata cannot be read, or differ from what was written.
    """
    hashes = read_manifest(folder)
    try:
        content = (folder / TREE).read_bytes() if hashes is None else read_verified(folder, TREE, hashes)
        return (parse_json(content).get("custom_metadata") or {}).get("about")
    except DamagedFiles:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedFiles(f"{folder / TREE} cannot be read: {error}") from None


def tree_hashes(folder: Path) -> Hashes | None:
    """Return the manifest of a saved tree; None if it was saved without one. Raises DamagedFiles if the manifest is
    lost or damaged."""
    hashes = read_manifest(folder)
    if hashes is None and read_about(folder) is not None:
        raise DamagedFiles(f"{folder / MANIFEST} is missing")
    return hashes


def is_chunk(file: str) -> bool:
    """Return True if a file of a saved tree is a chunk of an array ("params.embed/0.1")."""
    return re.fullmatch(r"[^/]+/\d+(\.\d+)*", file) is not None


def tree_faults(
    folder: Path,
    wanted: Callable[[str], bool] = lambda name: True,
    share: tuple[int, int] = (0, 1),
    *,
    chunks: bool = True,
) -> list[str] | None:
    """Return a line for each file of a saved tree that differs from what was written; None if it was saved without a
    manifest.

    Args:
      wanted: returns True for the names of arrays to check ("params.embed").
      share: `(i, n)`: read the i-th of n shares of the files.
      chunks: True to read the chunks of arrays; otherwise only their sizes are compared.
    """
    try:
        hashes = tree_hashes(folder)
    except DamagedFiles as error:
        return [str(error)]
    if hashes is None:
        return None

    def is_wanted(file: str) -> bool:
        name, inside, _ = file.partition("/")
        return not inside or wanted(name)

    return find_faults(
        folder, hashes, is_wanted, lambda file: file in WRITTEN_LAST, share, lambda file: chunks or not is_chunk(file)
    )


def quiet() -> None:
    """Keep Orbax from printing stacks (a failed save prints several, from several threads), and Python from warning
    about the coroutines that such a save never awaited."""
    logging.getLogger("absl").addFilter(_is_no_stack)  # both are added only once
    unawaited = "coroutine '.*(_create_paths|_write|_write_metadata_after_commits)' was never awaited"
    warnings.filterwarnings("ignore", unawaited, RuntimeWarning)


def cause_of(error: BaseException) -> str:
    """Return the cause of an exception in one line; for an error of the operating system, its message and file."""
    text = " ".join(str(error).split()) or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)
    file = re.search(r'local file "([^"]+)"', text)
    if code and file:
        return f"{os.strerror(int(code[1]))}: {file[1]}"
    return text.split(" [tensorstore_spec=")[0].split(" [source locations")[0]


def _is_no_stack(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)
