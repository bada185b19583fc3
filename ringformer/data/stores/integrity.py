"""Integrity of stores, verified by hashes of their files and of store.json itself.

The hashes are in store.json. Files are compared with them when a store is opened; for a store of more than AT_ONCE
bytes, a background thread does this. Training checks the thread's result at every batch (`raise_if_failed`) and waits
for it before a save (`wait`), so that no checkpoint depends on unverified tokens. Later reads are compared block by
block (`checked_array.py`). Every process verifies the store, because hosts may have their own copies.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringformer.data.stores.checked_array import REBUILD, CheckedArray, DamagedStore
from ringformer.files.hashes import hash_bytes, hash_object
from ringformer.files.json_text import parse_json
from ringformer.files.manifest import find_faults
from ringformer.files.untrusted import check_readable

FORMAT = 3
"""Store format that is written and read."""

AT_ONCE = 2**27
"""Most bytes of arrays to verify while opening a store; larger arrays are verified in a thread."""


def read_meta(path: Path) -> dict[str, Any]:
    """Read a store.json. Raises ValueError if it has a different format, or has changed since it was written."""
    try:
        check_readable(path)
        meta = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): {REBUILD}") from None
    if type(meta) is not dict or "format" not in meta:
        raise ValueError(f"{path} is damaged (it has no format): {REBUILD}")
    if meta["format"] != FORMAT:
        raise ValueError(
            f"{path.parent} has store format {meta['format']}, but this version reads {FORMAT}: build the store again, "
            "in another directory"
        )
    if meta.pop("checksum", None) != hash_object(meta):
        raise ValueError(f"{path} was edited or damaged: {REBUILD}")
    return meta


def check_files(
    folder: Path, files: Mapping[str, Sequence[Any]], read: Callable[[str], bool] = lambda name: True
) -> None:
    """Raise ValueError for a file that is missing or has changed.

    Args:
      files: [bytes, hash] of each file.
      read: selects the files to compare with their hashes; only the sizes of the others are compared.
    """
    entries = {name: (size, digest) for name, (size, digest) in files.items()}
    faults = find_faults(folder, entries, read=read)
    if faults:
        raise ValueError(f"{faults[0]}: {REBUILD}")


def verified(path: Path, digest: str) -> bytes:
    """Read a file. Raises ValueError if its content does not have this hash."""
    content = path.read_bytes()
    _compare(path, hash_bytes(content), digest)
    return content


class ContentCheck:
    """Comparison of a store's arrays with their hashes, started when the store is opened.

    Args:
      folder: the store.
      arrays: the arrays, with the hashes of their files.

    Raises:
      ValueError: for an array that is verified immediately and has changed since it was written.
    """

    def __init__(self, folder: Path, arrays: Mapping[CheckedArray, str]):
        self._folder = folder
        self._arrays = arrays
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._in_background, name="store check", daemon=True)
        if sum(array.bytes for array in arrays) > AT_ONCE:
            self._thread.start()
        else:
            self._compare_all()

    @property
    def pending(self) -> bool:
        """True until all files have been verified."""
        return self._thread.is_alive()

    def raise_if_failed(self) -> None:
        """Raise the error of the thread, if it has failed already."""
        if self._error:
            raise self._error

    def wait(self, say: Callable[[str], None] | None = None) -> None:
        """Wait for the verification. Raises ValueError naming a file that has changed since it was written."""
        if self.pending:
            if say:
                say(f"waiting until the contents of {self._folder} are verified")
            self._thread.join()
        self.raise_if_failed()

    def _in_background(self) -> None:
        try:
            self._compare_all()
        except Exception as error:  # raised by raise_if_failed
            self._error = error

    def _compare_all(self) -> None:
        for array, digest in self._arrays.items():
            _compare(array.path, array.whole_hash(), digest)


def _compare(path: Path, present: str, written: str) -> None:
    if present != written:
        raise DamagedStore(f"{path} is not what was written, by its hash ({present}, not {written}): {REBUILD}")
