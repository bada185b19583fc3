"""An array in a file, read in blocks of which each is compared with what stood there before.

No memory map: of a file that is cut under a run a map's next page is a SIGBUS, and what was compared there is not what
is used a moment later. Here the bytes that were compared are those that are returned.

The hashes of blocks are in memory alone. Whoever reads a block first sets its hash, be it the verification of the whole
file (`whole_hash`) or a reader that is ahead of it; all others compare with it. So once the whole file's hash was the
right one, whatever was read of it, before or after, was what was written; and no format of a store has to know.
"""

import os
import threading
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest as hash_block
from xxhash import xxh3_128

BLOCK = 2**14
"""Bytes of a block: what a single token costs to read, and 8 bytes of memory stand for."""
AT_ONCE = 2**8
"""Blocks that a verification reads at once."""

REBUILD = "delete the store and build it again, or bring back a copy that is whole"


class DamagedStore(ValueError):
    """A file of a store does not hold what was written, or no longer, or cannot be read."""


class CheckedArray:
    """The array [n] in a file of nothing else; a slice, an index or `join` reads a copy of a part.

    Reading raises DamagedStore, with the file and the bytes, for what is not as it was. Any threads may read.

    Attributes:
      path: the file.
      bytes: its size.
      dtype: of an element; its size divides BLOCK.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype, self.itemsize = path, dtype, dtype.itemsize
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.bytes = os.fstat(self._file).st_size
        self._hashes = array("Q", bytes(8 * -(-self.bytes // BLOCK)))  # 0: nobody has read it yet
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.bytes // self.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: slice | int) -> Any:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self._stretch(place, place + 1)[0]
        start, stop, step = index.indices(len(self))
        return self._stretch(start, stop)[::step] if step > 0 else self[:][index]

    def join(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The elements of some stretches, one after the other; `begins` and `ends`, int64, are theirs in the file."""
        stretches = [self._stretch(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return stretches[0] if len(stretches) == 1 else np.concatenate([np.empty(0, self.dtype), *stretches])

    def whole_hash(self) -> str:
        """The xxh3_128 of the file, which is read from its beginning to its end."""
        whole = xxh3_128()
        for first in range(0, len(self._hashes), AT_ONCE):
            whole.update(self._read(first, first + AT_ONCE))
        return whole.hexdigest()

    def _stretch(self, begin: int, end: int) -> np.ndarray:
        if begin >= end:
            return np.empty(0, self.dtype)
        first = begin * self.itemsize // BLOCK
        content = self._read(first, -(-end * self.itemsize // BLOCK))
        return np.frombuffer(content, self.dtype, end - begin, begin * self.itemsize - first * BLOCK)

    def _read(self, first: int, end: int) -> bytes:
        """The content of the blocks from `first` up to `end`, or up to the file's end."""
        offset, stop = first * BLOCK, min(end * BLOCK, self.bytes)
        parts = []
        while offset < stop:
            try:
                parts.append(os.pread(self._file, stop - offset, offset))
            except OSError as error:
                raise DamagedStore(f"{self.path} cannot be read ({error.strerror or error}): {REBUILD}") from error
            if not parts[-1]:
                raise DamagedStore(
                    f"{self.path} has changed since it was opened: it ends after {offset:,} bytes, of "
                    f"{self.bytes:,}; {REBUILD}"
                )
            offset += len(parts[-1])
        content = b"".join(parts)  # not copied where it is one
        self._compare(first, content)
        return content

    def _compare(self, first: int, content: bytes) -> None:
        view = memoryview(content)
        for number, at in enumerate(range(0, len(content), BLOCK), first):
            found = hash_block(view[at : at + BLOCK])
            if self._hashes[number] != found:
                self._set(number, found)

    def _set(self, number: int, found: int) -> None:
        """Let `found` be the hash of a block that nobody has read yet."""
        with self._lock:
            if not self._hashes[number]:
                self._hashes[number] = found
        if self._hashes[number] != found:
            begin, end = number * BLOCK, min((number + 1) * BLOCK, self.bytes)
            raise DamagedStore(
                f"{self.path} has changed since it was opened, between bytes {begin:,} and {end:,}: {REBUILD}"
            )
