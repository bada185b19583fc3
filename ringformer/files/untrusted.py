"""Files of a folder that came from somebody else: its own, and no others of this machine.

A model's folder names files (an index of shards) and may hold symbolic links. What it has is read, converted and copied
into checkpoints and exports, so either could take any readable file along.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringformer.files.atomic import CHECKSUM
from ringformer.files.hashes import hash_object

CACHED = ("models--", "datasets--", "spaces--")
"""The beginnings of a repository's folder in the Hugging Face cache; its snapshots are links into its blobs."""


def contained(folder: str | Path, name: str) -> Path:
    """The path of the file `name` in `folder`, whether it is there or not.

    Raises ValueError if `name` is no plain file name, or a link to anything but another file of the folder itself, or,
    in a snapshot of the Hugging Face cache, to a blob of the same repository. The folder may itself be a link.
    """
    if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{folder} names a file {name!r}, which is no plain file name: its files must lie in it")
    path = Path(folder) / name
    if path.is_symlink():
        root = Path(folder).resolve()
        try:
            target = path.resolve(strict=False)
        except RuntimeError:  # a loop, in Python 3.12 and older
            target = path
        if target == path or target.parent not in (root, *_blobs(root)):
            raise ValueError(
                f"{path} is a link to {path.readlink()}, out of its folder: somebody else's folder could copy any file "
                f"so. If you made the link yourself, give a copy without links: cp -rL {folder} COPY"
            )
    return path


def contained_files(folder: str | Path, names: Iterable[str]) -> list[Path]:
    """The paths of those of the files `names` that `folder` has. Raises ValueError as `contained` does."""
    return [path for path in [contained(folder, name) for name in names] if path.is_file()]


def read_object(folder: str | Path, name: str, advice: str = "download it again") -> dict[str, Any]:
    """The JSON object in the file `name` of `folder`. Raises ValueError, with the advice, if it is none or has a
    checksum (`atomic.write_object`) that is not its own, and as `contained` does."""
    path = contained(folder, name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; {advice}") from None
    if type(value) is not dict:
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object; {advice}")
    if value.pop(CHECKSUM, None) not in (None, hash_object(value)):
        raise ValueError(
            f"{path} is not what was written, by its checksum: bring back a copy; if you changed it on purpose, take "
            f"its {CHECKSUM} out"
        )
    return value


def _blobs(root: Path) -> list[Path]:
    """The folders that links of a snapshot lead to: of REPOSITORY/snapshots/REVISION/... REPOSITORY/blobs."""
    snapshots = (path for path in root.parents if path.name == "snapshots")
    return [path.parent / "blobs" for path in snapshots if path.parent.name.startswith(CACHED)]
