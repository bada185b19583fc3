"""A saved tree of arrays: a folder that Orbax makes, with a manifest of all its files' hashes (`files/manifest.py`).

Each process hashes what it wrote, process 0 the rest, before Orbax gives the folder its name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ringformer.files.manifest import MANIFEST, DamagedFiles, find_faults, read_manifest, write_manifest
from ringformer.hardware.absent_tpu import leave_absent_tpu_alone

leave_absent_tpu_alone()  # before a backend starts

WRITTEN_LAST = ("commit_success.txt", "_CHECKPOINT_METADATA")
"""What Orbax writes when everything else is there; nothing that is restored depends on it."""


class PlainFiles(ocp.PyTreeCheckpointHandler):
    """A handler of trees with leaves of one kind, each a folder of plain zarr files; with a manifest.

    Args:
      hashing_processes: how many processes leave hashes of the files that they write (`write_part`).
    """

    def __init__(self, kind: type, handler: ocp.type_handlers.TypeHandler, hashing_processes: int = 0):
        self._hashing_processes = hashing_processes
        self.leaves = handler
        array = jax.Array, ocp.type_handlers.ArrayHandler()  # or Orbax warns that there is none
        kinds = ocp.type_handlers.create_type_handler_registry(array, (kind, handler))
        super().__init__(use_ocdbt=False, type_handler_registry=kinds)

    def finalize(self, directory) -> None:
        """Write the manifest, and nothing else: Orbax would merge the databases of processes, and warn that there are
        none. On process 0, when all have written, and before the folder has its name."""
        write_manifest(Path(directory), self._hashing_processes, but=WRITTEN_LAST)


@ocp.args.register_with_handler(PlainFiles, for_save=True)
class Save(ocp.args.PyTreeSave):
    """The arguments with which `PlainFiles` saves a tree; with what a caller has to say about it, as JSON has it."""

    def __init__(self, item: Any, about: dict[str, Any] | None = None):
        super().__init__(item, custom_metadata={"manifest": MANIFEST, "about": about or {}})


@ocp.args.register_with_handler(PlainFiles, for_restore=True)
class Restore(ocp.args.PyTreeRestore):
    """The arguments with which `PlainFiles` restores."""


def read_about(folder: Path) -> dict[str, Any] | None:
    """What was said about a saved tree; None if it was saved before there were manifests.

    Raises DamagedFiles if the folder's metadata cannot be read.
    """
    try:
        said = json.loads((folder / "_METADATA").read_text()).get("custom_metadata") or {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedFiles(f"{folder / '_METADATA'} cannot be read: {error}") from None
    return said.get("about")


def tree_faults(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, share: tuple[int, int] = (0, 1)
) -> list[str] | None:
    """What of a saved tree's files is not as it was written, a line each; None if it was saved without a manifest.

    Args:
      wanted: of the arrays, by their names ("params.embed"), those to be looked at.
      share: `(i, n)`: hash the i-th of n shares of the files.
    """
    try:
        hashes = read_manifest(folder)
        if hashes is None:
            if read_about(folder) is None:
                return None
            return [f"{folder / MANIFEST} is missing"]
    except DamagedFiles as error:
        return [str(error)]

    def is_wanted(file: str) -> bool:
        name, inside, _ = file.partition("/")
        return not inside or wanted(name)

    return find_faults(folder, hashes, is_wanted, lambda file: file in WRITTEN_LAST, share)
