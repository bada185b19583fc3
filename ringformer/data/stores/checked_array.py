"""Array in a file that is read in blocks; each block is compared with its content when it was first read.

The file is not memory-mapped: if it were truncated during a run, touching the next page would raise SIGBUS, and mapped
bytes could change between comparison and use. Here the bytes that are compared are the bytes that are returned.

The hashes of blocks exist only in memory. The first reader of a block sets its hash; this may be the verification of
the whole file (`whole_hash`), or a reader ahead of it. All later readers compare the block with this hash. Therefore,
once the hash of the whole file is verified, everything that was read or will be read from the file is what was written.
The store's format needs no block hashes.
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
"""Bytes of a block. Reading a single token reads a whole block; the hash of a block takes 8 bytes of memory."""
AT_ONCE = 2**8
"""Blocks that a verification reads at a time."""

REBUILD = "delete the store and build it again, or restore an intact copy"


class DamagedStore(ValueError):
    """Error for a store's file that has changed since it was written, or cannot be read."""


class CheckedArray:
    """An array [n] that fills a file; a slice, an index or `join` reads a copy of a part.

    Reading content that has changed raises DamagedStore, which names the file and the bytes. Any thread may read.

    Attributes:
      path: the file.
      bytes: size of the file.
      dtype: dtype of an element; its size divides BLOCK.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self.path = path
        self.dtype = dtype
        self.itemsize: int = dtype.itemsize
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.bytes: int = os.fstat(self._file).st_size
        self._hashes = array("Q", bytes(8 * -(-self.bytes // BLOCK)))  # 0: not read yet
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
        if step < 0:
            return self[:][index]
        return self._stretch(start, stop)[::step]

    def join(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Read and concatenate stretches; `begins` and `ends`, int64, are their places in the file."""
        stretches = [self._stretch(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        if len(stretches) == 1:
            return stretches[0]
        return np.concatenate([np.empty(0, self.dtype), *stretches])

    def whole_hash(self) -> str:
        """Compute the xxh3_128 of the whole file, reading it from beginning to end."""
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
        """Read the blocks from `first` up to `end`, or up to the end of the file."""
        offset = first * BLOCK
        stop = min(end * BLOCK, self.bytes)
        parts = []
        while offset < stop:
            try:
                parts.append(os.pread(self._file, stop - offset, offset))
            except OSError as error:
                raise DamagedStore(f"{self.path} cannot be read ({error.strerror or error}): {REBUILD}") from error
            if not parts[-1]:
                raise DamagedStore(
                    f"{self.path} has changed since it was opened: it ends after {offset:,} of {self.bytes:,} bytes; "
                    f"{REBUILD}"
                )
            offset += len(parts[-1])
        content = b"".join(parts)  # a single part is not copied
        view = memoryview(content)
        for number, at in enumerate(range(0, len(content), BLOCK), first):
            digest = hash_block(view[at : at + BLOCK])
            if self._hashes[number] != digest:
                self._set(number, digest)
        return content

    def _set(self, number: int, digest: int) -> None:
        """Set the hash of a block that was not read before; raise DamagedStore if the block already has a different
        hash."""
        with self._lock:
            if not self._hashes[number]:
                self._hashes[number] = digest
        if self._hashes[number] != digest:
            begin = number * BLOCK
            end = min((number + 1) * BLOCK, self.bytes)
            raise DamagedStore(
                f"{self.path} has changed since it was opened, between bytes {begin:,} and {end:,}: {REBUILD}"
            )
