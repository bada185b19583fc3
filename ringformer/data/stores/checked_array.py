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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BLOCK = 2**14
"""Bytes of a block: what a single token costs to read, and 8 bytes of memory stand for."""
AT_ONCE = 2**8
"""Blocks that a verification reads at once."""

REBUILD = "delete the store and build it again, or bring back a copy that is whole"


class DamagedStore(ValueError):
    """A file of a store does not hold what was written, or no longer, or cannot be read."""


class CheckedArray:
    """The array [n] in a file of nothing else; a slice or an array of indices reads a copy of it.

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
        self._hashes = np.zeros(-(-self.bytes // BLOCK), np.uint64)  # 0: nobody has read it yet
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.bytes // self.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._stretch(start, max(start, stop)) if step == 1 else self._gather(np.arange(start, stop, step))
        index = np.asarray(index, np.int64)
        return self._gather(index) if index.ndim else self._gather(index[None])[0]

    def whole_hash(self) -> str:
        """The xxh3_128 of the file, which is read from its beginning to its end."""
        whole, blocks = xxhash.xxh3_128(), len(self._hashes)
        for first in range(0, blocks, AT_ONCE):
            content = self._read(np.arange(first, min(first + AT_ONCE, blocks)))
            whole.update(content[: self.bytes - first * BLOCK].data)
        return whole.hexdigest()

    def _stretch(self, start: int, stop: int) -> np.ndarray:
        """The elements from `start` up to `stop`."""
        if start == stop:
            return np.empty(0, self.dtype)
        per_block = BLOCK // self.itemsize
        first = start // per_block
        content = self._read(np.arange(first, (stop - 1) // per_block + 1)).view(self.dtype)
        return content[start - first * per_block : stop - first * per_block]

    def _gather(self, places: np.ndarray) -> np.ndarray:
        """The elements at `places`, int64 [n], in any order. Of their blocks each is read once."""
        if not places.size:
            return np.empty(0, self.dtype)
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= len(self):
            raise IndexError(f"{self.path} has no elements {low} to {high}: it has {len(self)}")
        if (high - low) // 2 <= max(places.size, BLOCK // self.itemsize):
            return self._stretch(low, high + 1).take(places - low)
        shift = (BLOCK // self.itemsize).bit_length() - 1
        blocks = places >> shift
        visits = np.flatnonzero(np.concatenate([[True], blocks[1:] != blocks[:-1]]))
        numbers, at = np.unique(blocks[visits], return_inverse=True)
        moved = np.repeat((at - blocks[visits]) << shift, np.diff(visits, append=len(places)))
        return self._read(numbers).view(self.dtype).take(places + moved)

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        """The content of blocks, by their ascending numbers, uint8 [blocks * BLOCK]. What would be behind the file's
        end is anything."""
        content = np.empty(len(numbers) * BLOCK, np.uint8)
        view, hash_block, found = content.data, xxhash.xxh3_64_intdigest, []
        gaps = np.flatnonzero(numbers[1:] - numbers[:-1] != 1) + 1
        for begin, end in pairwise([0, *gaps.tolist(), len(numbers)]):
            offset = int(numbers[begin]) * BLOCK
            part = view[begin * BLOCK : min(end * BLOCK, begin * BLOCK + self.bytes - offset)]
            self._fill(part, offset)
            found += [hash_block(part[i : i + BLOCK]) for i in range(0, len(part), BLOCK)]
        self._compare(numbers, np.array(found, np.uint64) | np.uint64(1))
        return content

    def _fill(self, part: memoryview, offset: int) -> None:
        done = 0
        while done < len(part):
            try:
                size = os.preadv(self._file, [part[done:]], offset + done)
            except OSError as error:
                raise DamagedStore(f"{self.path} cannot be read ({error.strerror or error}): {REBUILD}") from error
            if not size:
                raise DamagedStore(f"{self.path} has changed since it was opened: it ends after {offset + done:,} "
                                   f"bytes, of {self.bytes:,}; {REBUILD}")  # fmt: skip
            done += size

    def _compare(self, numbers: np.ndarray, found: np.ndarray) -> None:
        with self._lock:
            known = self._hashes[numbers]
            differ = known != found
            if not differ.any():
                return
            self._hashes[numbers[known == 0]] = found[known == 0]
        changed = numbers[differ & (known != 0)]
        if len(changed):
            first, end = int(changed[0]) * BLOCK, min((int(changed[-1]) + 1) * BLOCK, self.bytes)
            raise DamagedStore(f"{self.path} has changed since it was opened, between bytes {first:,} and {end:,}: "
                               f"{REBUILD}")  # fmt: skip
