"""What keeps a store from being read as another than was built: hashes of its files, and of store.json itself.

The hashes stand in store.json and are compared when a store is opened, those of more than AT_ONCE bytes in a thread,
for whose verdict nobody waits to begin. Who trains asks for it at every batch (`raise_if_failed`) and waits for it
before a save (`wait`), so that no checkpoint has seen a token that was not verified. Every process verifies what it
reads, since hosts may have copies of their own.
"""

import json
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ringformer.file_hashes import hash_file

FORMAT = 3
"""The format of stores that is written, and read."""

AT_ONCE = 2**27
"""Stores of so many bytes are verified before they are open; of larger ones only the files that must be `first`."""

REBUILD = "delete the store and build it again, or bring back a copy that is whole"


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


class ContentCheck:
    """The comparison of files with their hashes; made when their store is opened.

    Args:
      folder: the store.
      files: [bytes, hash] of each file.
      first: the files that are verified at once whatever their size.

    Raises:
      ValueError: for a file that is missing or of another size, or is verified at once and not what was written.
    """

    def __init__(self, folder: Path, files: Mapping[str, tuple[int, str]], first: Collection[str] = ()):
        self._folder = folder
        self._hashes = {name: digest for name, (_, digest) in files.items()}
        self._error: Exception | None = None
        for name, (size, _) in files.items():
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name} is missing: {REBUILD}")
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{folder / name} has {found} bytes, not the {size} that were written: {REBUILD}")
        large = sum(size for size, _ in files.values()) > AT_ONCE
        later = [name for name in files if large and name not in first]
        for name in files.keys() - later:
            self._compare(name)
        self._thread = threading.Thread(target=self._compare_all, args=(later,), name="store check", daemon=True)
        if later:
            self._thread.start()

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

    def _compare_all(self, names: list[str]) -> None:
        try:
            for name in names:
                self._compare(name)
        except Exception as error:  # whoever asks gets it
            self._error = error

    def _compare(self, name: str) -> None:
        path = self._folder / name
        try:
            found = hash_file(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror or error}): {REBUILD}") from error
        if found != self._hashes[name]:
            raise ValueError(
                f"{path} is not what was written, by its hash ({found}, not {self._hashes[name]}): {REBUILD}"
            )
