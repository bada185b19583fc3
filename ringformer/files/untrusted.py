"""Files of an untrusted folder: only the folder's own files are read, and no other files of this machine.

The folder of a model names files (in the index of its shards) and may contain symbolic links. Its files are read,
converted, and copied into checkpoints and exports, so a name or a link could leak any file that the user can read.
"""

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringformer.files.atomic import CHECKSUM
from ringformer.files.hashes import hash_object
from ringformer.files.json_text import parse_json

CACHED = ("models--", "datasets--", "spaces--")
"""Prefixes of the folders of repositories in the Hugging Face cache; a repository's snapshots are links to its
blobs."""


def contained(folder: str | Path, name: str) -> Path:
    """Return the path of the file `name` in `folder`; the file need not exist. The folder may itself be a link.

    Raises ValueError if `name` is not a plain file name, or if it is a link. Two kinds of links are allowed: to another
    file of the same folder, and from a snapshot in the Hugging Face cache to a blob of the same repository.
    """
    if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{folder} names a file {name!r}, which is no plain file name: its files must lie in it")
    path = Path(folder) / name
    if path.is_symlink():
        root = Path(folder).resolve()
        try:
            target = path.resolve()
        except RuntimeError:  # a loop, in Python 3.12 and older
            target = path
        if target == path or target.parent not in (root, *_blobs(root)):
            raise ValueError(
                f"{path} is a link to {path.readlink()}, outside its folder: a stranger's folder could leak any "
                f"file in this way. If you made the link yourself, pass a copy without links: cp -rL {folder} COPY"
            )
    return path


def contained_files(folder: str | Path, names: Iterable[str]) -> list[Path]:
    """Return the paths of the files `names` that exist in `folder`. Raises ValueError like `contained`."""
    paths = [contained(folder, name) for name in names]
    return list(filter(Path.is_file, paths))


def check_readable(path: str | Path) -> None:
    """Raise OSError for a pipe or a device, which may keep its reader waiting for ever, or never end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_object(folder: str | Path, name: str, advice: str = "download it again") -> dict[str, Any]:
    """Return the JSON object in the file `name` of `folder`.

    Raises ValueError like `contained`, and if the file is not a JSON object (with `advice`) or if its checksum
    (`atomic.write_object`) does not match.
    """
    path = contained(folder, name)
    try:
        check_readable(path)
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {advice}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {advice}") from None
    if type(value) is not dict:
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object; {advice}")
    if value.pop(CHECKSUM, None) not in (None, hash_object(value)):
        raise ValueError(
            f"{path} is not what was written: its checksum differs. Restore a copy; if you changed it on purpose, "
            f"remove its {CHECKSUM}"
        )
    return value


def _blobs(root: Path) -> list[Path]:
    """Return the folders that a snapshot may link to: REPOSITORY/blobs for REPOSITORY/snapshots/REVISION/..."""
    blobs = []
    for path in root.parents:
        if path.name == "snapshots" and path.parent.name.startswith(CACHED):
            blobs.append(path.parent / "blobs")
    return blobs
