"""Manifest of a folder: the size and hash of each file, with which later changes on the disk are detected and named.

manifest.json     {file: [bytes, hash]}, with paths relative to the folder

The hash of an array's chunk is the CRC-32C at the end of its file; the hash of any other file is its xxh3_128.
"""

import json
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ringformer.files.atomic import read_back, write_whole
from ringformer.files.chunks import has_valid_crc32c
from ringformer.files.hashes import hash_bytes
from ringformer.files.json_text import parse_json
from ringformer.files.untrusted import check_readable

MANIFEST = "manifest.json"
THREADS = 8
"""Threads that read and verify files; each holds the content of one file in memory."""
CRC = "crc32c:"
DIFFERS = "is not what was written: its hash differs"

Entry = tuple[int, str]
"""(bytes, hash) of a file."""
Hashes = dict[str, Entry]
"""{file: (bytes, hash)}."""


class DamagedFiles(OSError):
    """Files differ from what was written."""


def entry_of(content: bytes) -> Entry:
    """Return the manifest's entry for a file with this content."""
    return len(content), hash_bytes(content)


def chunk_entry_of(content: bytes) -> Entry:
    """Return the manifest's entry for the file of a chunk, whose last four bytes are the CRC-32C of the others."""
    return len(content), f"{CRC}{int.from_bytes(content[-4:], 'little'):08x}"


def write_part(folder: Path, process: int, hashes: Hashes) -> None:
    """Write the entries of the files that one of several processes wrote; `write_manifest` collects them."""
    _write(_part(folder, process), hashes)


def write_manifest(folder: Path, parts: int = 0, names: Iterable[str] | None = None, but: Collection[str] = ()) -> None:
    """Write the manifest of a folder.

    Args:
      parts: number of processes that called `write_part`. Files that are in no process's part are read back and hashed
        here.
      names: files to list; None: all files except those in `but`.

    Raises OSError if one of the processes did not call `write_part`.
    """
    hashes: Hashes = {}
    left = [_part(folder, process) for process in range(parts)]
    for path in left:
        hashes |= parse_json(path.read_text())
    for path in left:
        path.unlink()
    if names is None:
        names = _files(folder) - hashes.keys() - set(but)
    rest = sorted(names)
    with ThreadPoolExecutor(THREADS) as threads:
        hashes |= zip(rest, threads.map(lambda name: entry_of(read_back(folder / name)), rest), strict=True)
    _write(folder / MANIFEST, dict(sorted(hashes.items())))


def read_manifest(folder: Path) -> Hashes | None:
    """Return the manifest of a folder; None if it has none. Raises DamagedFiles if its content is not a manifest."""
    path = folder / MANIFEST
    try:
        check_readable(path)
        hashes = parse_json(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedFiles(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        hashes = None
    if type(hashes) is not dict or not all(_is_entry(name, entry) for name, entry in hashes.items()):
        raise DamagedFiles(f"{path} is not what was written: it is no list of files and hashes")
    return {name: (size, digest) for name, (size, digest) in hashes.items()}


def _is_entry(name: str, entry: object) -> bool:
    """Return True for the name of a file inside a folder, with its size and hash."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    return type(entry) is list and list(map(type, entry)) == [int, str]


def read_verified(folder: Path, name: str, hashes: Hashes, *, verify_crc: bool = True) -> bytes:
    """Read a file once, compare it with its entry in the manifest, and return the content that was compared.

    Args:
      verify_crc: True to verify that the CRC-32C of a chunk matches its content. (Decoding the chunk verifies this
        too.)

    Raises DamagedFiles, with the file's path first, if the file differs from what was written.
    """
    path = folder / name
    if name not in hashes:
        raise DamagedFiles(f"{path} is not in {MANIFEST}")
    try:
        check_readable(path)
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedFiles(f"{path} is missing") from None
    except OSError as error:  # the disk cannot return it
        raise DamagedFiles(f"{path} cannot be read: {error.strerror}") from error
    verify_content(path, content, hashes[name], verify_crc=verify_crc)
    return content


def verify_content(path: Path, content: bytes, entry: Entry, *, verify_crc: bool = True) -> None:
    """Raise DamagedFiles if the content of a file does not match its entry. `verify_crc`: see `read_verified`."""
    _check_size(path, len(content), entry)
    if entry[1].startswith(CRC):
        same = chunk_entry_of(content) == entry and (not verify_crc or has_valid_crc32c(content))
    else:
        same = entry_of(content) == entry
    if not same:
        raise DamagedFiles(f"{path} {DIFFERS}")


def find_faults(
    folder: Path,
    hashes: Hashes,
    wanted: Callable[[str], bool] = lambda name: True,
    unlisted: Callable[[str], bool] | None = None,
    share: tuple[int, int] = (0, 1),
    read: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Return a line for each difference between a folder and its manifest, `hashes`; each line begins with the file's
    path.

    Args:
      wanted: returns True for files to check.
      unlisted: returns True for files that may exist although they are not in the manifest; None: any file may.
      share: `(i, n)`: read the i-th of n shares of the files, about equal in bytes.
      read: returns True for files to read and compare; only the sizes of the others are compared.
    """
    index, count = share
    listed = sorted(filter(wanted, hashes), key=lambda name: (-hashes[name][0], name))
    ours = set(list(filter(read, listed))[index::count])

    def fault(name: str) -> str:
        path = folder / name
        try:
            if name in ours:
                read_verified(folder, name, hashes)
            elif path.is_file():
                _check_size(path, path.stat().st_size, hashes[name])
            else:
                return f"{path} is missing"
        except DamagedFiles as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(THREADS) as threads:
        faults = list(filter(None, threads.map(fault, listed)))
    if unlisted is not None:
        for name in sorted(_files(folder) - hashes.keys()):
            if wanted(name) and not unlisted(name):
                faults.append(f"{folder / name} is not in {MANIFEST}")
    return faults


def check_named(folder: Path) -> None:
    """Raise DamagedFiles if a file in a folder's manifest differs from what was written; pass without a manifest."""
    if faults := find_faults(folder, read_manifest(folder) or {}):
        raise DamagedFiles(
            f"{'; '.join(faults[:3])}. Write the folder again; if you changed it on purpose, delete {folder / MANIFEST}"
        )


def _check_size(path: Path, size: int, entry: Entry) -> None:
    if size != entry[0]:
        raise DamagedFiles(f"{path} has {size} bytes, {entry[0]} were written")


def _part(folder: Path, process: int) -> Path:
    return folder / f"manifest.{process}.json"


def _files(folder: Path) -> set[str]:
    """Return the files below a folder, except its manifest."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST}


def _write(path: Path, hashes: Hashes) -> None:
    write_whole(path, json.dumps(hashes, indent=0) + "\n")
