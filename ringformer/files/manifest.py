"""A folder's manifest: hashes of its files, by which what changes on the disk afterwards is found, and named.

manifest.json     {file: [bytes, hash]}, the file relative to the folder
"""

import json
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ringformer.files.atomic import sync, write_whole
from ringformer.files.hashes import hash_file

MANIFEST = "manifest.json"
THREADS = 8
"""That hash a folder's files; a hash works without the interpreter's lock."""

Hashes = dict[str, tuple[int, str]]
"""{file: (bytes, hash)}."""


class DamagedFiles(OSError):
    """Files are not what they were when they were written."""


def write_part(folder: Path, process: int, hashes: Hashes) -> None:
    """Leave for `write_manifest` the hashes of the files that one of several processes wrote."""
    _write(_part(folder, process), hashes)


def write_manifest(folder: Path, parts: int = 0, names: Iterable[str] | None = None, but: Collection[str] = ()) -> None:
    """Write the manifest of a folder's files, `but` these, or of those that `names` has.

    Args:
      parts: so many processes left hashes of files of theirs; the others are hashed here, once they are on the disk.

    Raises OSError if a process left none.
    """
    hashes: Hashes = {}
    left = [_part(folder, process) for process in range(parts)]
    for path in left:
        hashes |= json.loads(path.read_text())
    for path in left:
        path.unlink()
    rest = sorted(_files(folder) - hashes.keys() - set(but) if names is None else names)
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(sync, [folder / name for name in rest]):
            pass
    _write(folder / MANIFEST, dict(sorted((hashes | _hash_all(folder, rest)).items())))


def read_manifest(folder: Path) -> Hashes | None:
    """The manifest of a folder; None if it has none. Raises DamagedFiles if it is not one."""
    path = folder / MANIFEST
    try:
        hashes = json.loads(path.read_text())
        whole = type(hashes) is dict and all(_is_entry(name, entry) for name, entry in hashes.items())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise DamagedFiles(f"{path} is not what was written: it is no list of files and hashes")
    return {name: (size, digest) for name, (size, digest) in hashes.items()}


def find_faults(
    folder: Path,
    hashes: Hashes,
    wanted: Callable[[str], bool] = lambda name: True,
    unlisted: Callable[[str], bool] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[str]:
    """What of a folder's files is not as its manifest, `hashes`, says; each a line that begins with the file's path.

    Args:
      wanted: of the files, those to be looked at.
      unlisted: files that may stand there without being in the manifest; None: any.
      share: `(i, n)`: of the files that are there, hash the i-th of n shares, about equal in bytes.
    """
    faults, found = [], []
    for name in filter(wanted, hashes):
        path, size = folder / name, hashes[name][0]
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif (now := path.stat().st_size) != size:
            faults.append(f"{path} has {now} bytes, {size} were written")
        else:
            found.append(name)
    if unlisted is not None:
        strange = [name for name in sorted(_files(folder) - hashes.keys()) if wanted(name) and not unlisted(name)]
        faults += [f"{folder / name} is not in {MANIFEST}" for name in strange]
    index, count = share
    ours = sorted(found, key=lambda name: (-hashes[name][0], name))[index::count]
    try:
        found_hashes = _hash_all(folder, ours)
    except OSError as error:  # the disk cannot give a file back
        return [*faults, f"{error.filename or folder} cannot be read: {error.strerror}"]
    return faults + [
        f"{folder / name} is not what was written: its hash differs"
        for name in ours
        if found_hashes[name] != hashes[name]
    ]


def check_named(folder: Path) -> None:
    """Raise DamagedFiles if a file that the folder's manifest names is not as it was written; without one, pass."""
    if faults := find_faults(folder, read_manifest(folder) or {}):
        raise DamagedFiles(
            f"{'; '.join(faults[:3])}. Write the folder anew; if you changed it on purpose, delete {folder / MANIFEST}"
        )


def hash_of(path: Path) -> tuple[int, str]:
    """A file's entry of a manifest."""
    return path.stat().st_size, hash_file(path)


def _part(folder: Path, process: int) -> Path:
    return folder / f"manifest.{process}.json"


def _files(folder: Path) -> set[str]:
    """The files below a folder, but for its manifest."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST}


def _hash_all(folder: Path, names: list[str]) -> Hashes:
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: hash_of(folder / name), names), strict=True))


def _is_entry(name: str, entry: object) -> bool:
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return inside and type(entry) is list and [type(x) for x in entry] == [int, str]


def _write(path: Path, hashes: Hashes) -> None:
    write_whole(path, json.dumps(hashes, indent=0) + "\n")
