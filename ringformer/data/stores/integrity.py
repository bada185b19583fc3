"""What keeps a store from being read as another than was built: hashes of its files, and of store.json itself.

The hashes stand in store.json and are compared when a store is opened, those of more than AT_ONCE bytes in a thread,
for whose verdict nobody waits to begin. Who trains asks for it at every batch (`raise_if_failed`) and waits for it
before a save (`wait`), so that no checkpoint has seen a token that was not verified; what is read later is compared
with it block by block (`checked_array.py`). Every process verifies what it reads, since hosts may have copies of their
own.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ringformer.data.stores.checked_array import REBUILD, CheckedArray, DamagedStore
from ringformer.files.hashes import hash_bytes

FORMAT = 3
"""The format of stores that is written, and read."""

AT_ONCE = 2**27
"""Stores of so many bytes are verified before they are open, arrays of larger ones in a thread."""


def checksum(meta: Mapping[str, Any]) -> str:
    """The hash of a store.json's content but for the key "checksum", whatever its spaces and the order of its keys."""
    content = {key: value for key, value in meta.items() if key != "checksum"}
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(path: Path) -> dict[str, Any]:
    """The content of a store.json. Raises ValueError if it is of another format, or not as it was written."""
    try:
        meta = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {REBUILD}") from None
    if type(meta) is not dict or "format" not in meta:
        raise ValueError(f"{path} is damaged (it has no format): {REBUILD}")
    if meta["format"] != FORMAT:
        raise ValueError(
            f"{path.parent} has store format {meta['format']}, this version reads {FORMAT}: build the store again, "
            "in another directory"
        )
    if meta.get("checksum") != checksum(meta):
        raise ValueError(f"{path} is not as it was written, edited or damaged: {REBUILD}")
    return meta


def check_sizes(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Raise ValueError for a file that is missing or has another size; `files` has [bytes, hash] of each."""
    for name, (size, _) in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {REBUILD}")
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"{folder / name} has {found} bytes, not the {size} that were written: {REBUILD}")


def verified(path: Path, digest: str) -> bytes:
    """The content of a file. Raises ValueError if it is not the one with this hash."""
    content = path.read_bytes()
    _compare(path, hash_bytes(content), digest)
    return content


class ContentCheck:
    """The comparison of a store's arrays with their hashes; made when the store is opened.

    Args:
      folder: the store.
      arrays: each with the hash of its file.

    Raises:
      ValueError: for one that is verified at once, and not what was written.
    """

    def __init__(self, folder: Path, arrays: Mapping[CheckedArray, str]):
        self._folder, self._arrays = folder, arrays
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._in_background, name="store check", daemon=True)
        if sum(array.bytes for array in arrays) > AT_ONCE:
            self._thread.start()
        else:
            self._compare_all()

    @property
    def pending(self) -> bool:
        """Whether there are files whose verdict is not known yet."""
        return self._thread.is_alive()

    def raise_if_failed(self) -> None:
        """Raise what the thread found, if it has found something."""
        if self._error:
            raise self._error

    def wait(self, say: Callable[[str], None] | None = None) -> None:
        """Wait for the verdict; raises ValueError with the name of a file that is not what was written."""
        if self.pending:
            if say:
                say(f"waiting until the contents of {self._folder} are verified")
            self._thread.join()
        self.raise_if_failed()

    def _in_background(self) -> None:
        try:
            self._compare_all()
        except Exception as error:  # whoever asks gets it
            self._error = error

    def _compare_all(self) -> None:
        for array, digest in self._arrays.items():
            _compare(array.path, array.whole_hash(), digest)


def _compare(path: Path, found: str, written: str) -> None:
    if found != written:
        raise DamagedStore(f"{path} is not what was written, by its hash ({found}, not {written}): {REBUILD}")
