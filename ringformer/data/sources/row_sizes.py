"""Sizes of the rows of a table, before a row becomes Python's objects, and the limit that they must keep."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

BATCH_BYTES = 2**23
"""Most bytes of the rows that are read together; a larger row is read alone."""
RECORD_BYTES = 2**22
"""Bytes that a record may have beyond the limit of its document: names of fields, other fields and escapes."""
VALUE_BYTES = 64
"""Bytes that each text, list or object within a row counts for, besides those of its content."""
PYTHON_NUMBER = 32
"""Bytes of one of Python's numbers, with its place in a list."""


def record_bytes(max_bytes: int | None) -> int:
    """Return the most bytes of a record whose document has at most `max_bytes` bytes; None: no limit."""
    if max_bytes is None:
        return sys.maxsize - 1
    return max_bytes + RECORD_BYTES


class RowTooLarge(Exception):
    """A row beyond the limit. The reader of the file adds its name."""


@dataclass(frozen=True)
class RowLimit:
    """Most bytes of a row in memory, and how they are counted."""

    row_bytes: int
    number_bytes: int
    """Fewest bytes that a number within a row counts for."""
    batch_bytes: int
    """Most bytes of rows that are read together; a larger row is read alone."""

    def fitting(self, sizes: np.ndarray) -> int:
        """Return how many of the rows to read together, at least one. Raises RowTooLarge for a first row beyond the
        limit.

        Args:
          sizes: bytes of rows, int64 [rows].
        """
        if sizes[0] > self.row_bytes:
            raise RowTooLarge
        rows = int(np.searchsorted(np.cumsum(sizes), self.batch_bytes, "right"))
        return max(rows, 1)


class Wanted(NamedTuple):
    """Columns to read of a table, and limits of its rows."""

    only: Sequence[str] = ()
    """Columns, of those that the table has; if it has none of them, all are read."""
    max_bytes: int | None = None
    """Most bytes of a row, besides the `RECORD_BYTES` that any may have; None: no limit."""
    number_bytes: int = PYTHON_NUMBER
    """Fewest bytes that a number within a row counts for; 0: its own."""
    batch_bytes: int = BATCH_BYTES

    @property
    def limit(self) -> RowLimit:
        return RowLimit(record_bytes(self.max_bytes), self.number_bytes, self.batch_bytes)


def array_sizes(array: Any, limit: RowLimit) -> np.ndarray:
    """Return the bytes of each value of a valid pyarrow Array, as if values of dictionaries were copied, int64
    [values]."""
    import pyarrow
    import pyarrow.compute as compute

    types = pyarrow.types
    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return array_sizes(array.storage, limit)
    if types.is_dictionary(kind):
        sizes = np.append(array_sizes(array.dictionary, limit), 0)
        indices = array.indices.fill_null(len(array.dictionary)).to_numpy(zero_copy_only=False)
        return sizes[indices.astype(np.int64)] + VALUE_BYTES
    if types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        runs = np.searchsorted(ends, np.arange(len(array)) + array.offset, "right")
        return array_sizes(array.values, limit)[runs]
    if types.is_struct(kind):
        total = np.full(len(array), VALUE_BYTES, np.int64)
        for member in array.flatten():
            total += array_sizes(member, limit)
        return total
    if types.is_map(kind):
        pairs = pyarrow.struct([kind.key_field, kind.item_field])
        return array_sizes(array.cast(pyarrow.list_(pairs)), limit)
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        return _list_sizes(array, lengths.astype(np.int64), limit) + VALUE_BYTES
    if types.is_nested(kind):
        raise TypeError(f"its column of type {kind} cannot be read: write it as text, numbers, lists or objects")
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return array_sizes(array.cast(pyarrow.large_binary()), limit)
    texts = types.is_string(kind) or types.is_large_string(kind)
    if texts or types.is_binary(kind) or types.is_large_binary(kind):
        lengths = compute.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        return lengths.astype(np.int64) + VALUE_BYTES
    return np.full(len(array), number_bytes(kind, limit), np.int64)


def number_bytes(kind: Any, limit: RowLimit) -> int:
    """Return the bytes of a value of a pyarrow type whose values all have the same size."""
    import pyarrow

    if pyarrow.types.is_null(kind):
        return limit.number_bytes
    return max(kind.bit_width // 8, 1, limit.number_bytes)


def is_number(kind: Any) -> bool:
    """Return True for a pyarrow type whose values all have the same size: numbers and times."""
    import pyarrow

    return pyarrow.types.is_primitive(kind)


def _list_sizes(array: Any, lengths: np.ndarray, limit: RowLimit) -> np.ndarray:
    """Return the bytes of the values of each list, int64 [lists].

    Args:
      lengths: numbers of values, int64 [lists].
    """
    values = array.flatten()
    if is_number(values.type):
        return lengths * number_bytes(values.type, limit)
    in_bytes = np.append(0, np.cumsum(array_sizes(values, limit)))
    ends = np.append(0, np.cumsum(lengths))
    return np.diff(in_bytes[ends])
