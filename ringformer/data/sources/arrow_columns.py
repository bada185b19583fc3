"""Columns of an Arrow batch, read a few rows at a time: the offsets of rows tell their sizes before their values are
read.

So the memory that a batch takes is that of a few rows, whatever it has, and whatever its compressed buffers declare.
Every offset, index and length is checked; pyarrow gets only buffers that are right.
"""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ringformer.data.sources.arrow_messages import ArrowMessages, BatchMessage, FlatTable, Node, Range
from ringformer.data.sources.row_sizes import VALUE_BYTES, Damaged, RowLimit, RowTooLarge, array_sizes

BLOCK = 1024
"""Most rows whose sizes are looked at together."""
SKIPPED = 2**20
"""Most bytes to read at a time of those that no row has."""


class _FileRange(io.RawIOBase):
    """A range of a file, as a file of its own."""

    def __init__(self, file: IO[bytes], part: Range):
        super().__init__()
        self._descriptor = file.fileno()
        self._place = part.start
        self._left = part.size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            size = self._left
        content = os.pread(self._descriptor, size, self._place)
        self._place += len(content)
        self._left -= len(content)
        return content


class _Buffer:
    """A buffer, which is read from its beginning to its end and decompressed on the way."""

    def __init__(self, file: IO[bytes], part: Range, codec: str):
        import pyarrow

        raw = _FileRange(file, part)
        self._left = part.size
        self._stream: Any = raw
        if codec and part.size:
            self._left = int.from_bytes(raw.read(8), "little", signed=True)
            if self._left == -1:  # not compressed
                self._left = part.size - 8
            else:
                self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)

    def read(self, size: int) -> bytes:
        """Read bytes. Raises Damaged if the buffer has fewer."""
        if not 0 <= size <= self._left:
            raise Damaged(f"a buffer has {self._left:,} more bytes, and {size:,} are needed")
        parts = []
        missing = size
        while missing:
            part = self._stream.read(missing)
            if not part:
                raise Damaged(f"a buffer ends {missing:,} bytes before the end of its values")
            parts.append(part)
            missing -= len(part)
        self._left -= size
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Read bytes that no row has."""
        while size:
            part = min(size, SKIPPED)
            self.read(part)
            size -= part


class _Bits:
    """Bits of a buffer."""

    def __init__(self, buffer: _Buffer):
        self._buffer = buffer
        self._ahead = np.zeros(0, bool)

    def take(self, count: int) -> np.ndarray:
        """Return bits, bool [count]."""
        missing = count - len(self._ahead)
        if missing > 0:
            content = np.frombuffer(self._buffer.read(-(-missing // 8)), np.uint8)
            bits = np.unpackbits(content, bitorder="little").astype(bool)
            self._ahead = np.append(self._ahead, bits)
        taken = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return taken


def _packed(bits: np.ndarray) -> Any:
    import pyarrow

    return pyarrow.py_buffer(np.packbits(bits, bitorder="little"))


class Column(ABC):
    """A column of a batch. Its rows are read in order: first their sizes, then the rows.

    Args:
      node: its number of values.
      present: bits of the values that are not missing; None: all are there.
    """

    type: Any
    """pyarrow's type of the arrays that are read: texts of a dictionary become texts."""

    def __init__(self, node: Node, present: _Buffer | None):
        self.left: int = node.length
        """Number of rows that were not read yet."""
        self._present = None
        if node.nulls and present is not None:
            self._present = _Bits(present)

    @property
    def value_bytes(self) -> int | None:
        """Bytes of each row in memory; None if rows differ."""
        return None

    @abstractmethod
    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        """Return the bytes of the next rows in memory, int64 [rows]: at least one row, and at most `count`.

        Raises RowTooLarge if already the number of values in the first of them exceeds the limit.
        """

    @abstractmethod
    def _read(self, count: int, present: Any) -> Any:
        """Read rows. `present` is the bitmap of those that are not missing, or None."""

    def take(self, count: int) -> Any:
        """Read the next rows, a pyarrow Array. Raises Damaged if the batch has fewer."""
        self.check(count)
        present = None
        if self._present is not None and count:
            present = _packed(self._present.take(count))
        self.left -= count
        return self._read(count, present)

    def check(self, count: int) -> None:
        """Raise Damaged if the column has fewer rows left."""
        if not 0 <= count <= self.left:
            raise Damaged(f"{count:,} values are needed, and the array has {self.left:,} more")

    def skip(self, count: int, limit: RowLimit) -> None:
        """Read rows that no list has."""
        self.check(count)
        while count:
            rows = len(self.sizes(min(count, BLOCK), limit))
            self.take(rows)
            count -= rows


class _Missing(Column):
    """A column of the type null, which has no buffer."""

    def __init__(self, node: Node):
        import pyarrow

        super().__init__(node, None)
        self.type = pyarrow.null()

    @property
    def value_bytes(self) -> int:
        return 0

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        return np.zeros(count, np.int64)

    def _read(self, count: int, present: Any) -> Any:
        import pyarrow

        return pyarrow.nulls(count)


class _Numbers(Column):
    """A column of values with the same number of bytes: numbers, times, decimals."""

    def __init__(self, node: Node, present: _Buffer | None, kind: Any, values: _Buffer):
        super().__init__(node, present)
        self.type = kind
        self._values = values
        self._bits: _Bits | None = None
        self._width = kind.bit_width // 8
        if kind.bit_width == 1:
            self._bits = _Bits(values)

    @property
    def value_bytes(self) -> int:
        return max(self._width, 1)

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        return np.full(count, max(self.value_bytes, limit.number_bytes), np.int64)

    def _read(self, count: int, present: Any) -> Any:
        import pyarrow

        if self._bits is not None:
            values = _packed(self._bits.take(count))
        else:
            values = pyarrow.py_buffer(self._values.read(count * self._width))
        return pyarrow.Array.from_buffers(self.type, count, [present, values])


class _Offsets:
    """Offsets of rows of several lengths."""

    def __init__(self, buffer: _Buffer, dtype: Any):
        self._buffer = buffer
        self._dtype = np.dtype(dtype)
        self._ahead = np.zeros(0, self._dtype)
        self.place = 0
        """Number of bytes or values of earlier rows."""

    def peek(self, count: int) -> np.ndarray:
        """Return the places where the next rows begin, and where the last of them ends, int64 [count + 1]."""
        missing = count + 1 - len(self._ahead)
        if missing > 0:
            content = self._buffer.read(missing * self._dtype.itemsize)
            self._ahead = np.append(self._ahead, np.frombuffer(content, self._dtype))
        offsets = self._ahead[: count + 1].astype(np.int64)
        lengths = np.diff(offsets)
        if offsets[0] < self.place or (lengths < 0).any():
            raise Damaged(f"offsets decrease: {offsets[:8].tolist()} after {self.place:,}")
        return offsets

    def take(self, count: int) -> np.ndarray:
        """Return offsets as `peek` does, and go on behind their rows."""
        offsets = self.peek(count)
        self._ahead = self._ahead[count:]
        self.place = int(offsets[-1])
        return offsets


class _Texts(Column):
    """A column of texts or bytes."""

    def __init__(self, node: Node, present: _Buffer | None, kind: Any, offsets: _Offsets, content: _Buffer):
        super().__init__(node, present)
        self.type = kind
        self._offsets = offsets
        self._content = content

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        return np.diff(self._offsets.peek(count)) + VALUE_BYTES

    def _read(self, count: int, present: Any) -> Any:
        import pyarrow

        if not count:
            return pyarrow.array([], self.type)
        place = self._offsets.place
        offsets = self._offsets.take(count)
        self._content.skip(int(offsets[0]) - place)
        size = int(offsets[-1] - offsets[0])
        content = pyarrow.py_buffer(self._content.read(size))
        starts = (offsets - offsets[0]).astype(self._offsets._dtype)
        return pyarrow.Array.from_buffers(self.type, count, [present, pyarrow.py_buffer(starts), content])


def _list_sizes(lengths: np.ndarray, values: Column, limit: RowLimit) -> np.ndarray:
    """Return the bytes of lists of so many values each, as `Column.sizes` does."""
    ends = np.cumsum(lengths)
    value_bytes = values.value_bytes
    if value_bytes is not None:
        return lengths * max(value_bytes, limit.number_bytes) + VALUE_BYTES
    most = limit.row_bytes // VALUE_BYTES
    rows = int(np.searchsorted(ends, most, "right"))
    if not rows:
        raise RowTooLarge
    needed = int(ends[rows - 1])
    values.check(needed)
    value_sizes = np.zeros(0, np.int64)
    if needed:
        value_sizes = values.sizes(needed, limit)
    rows = int(np.searchsorted(ends[:rows], len(value_sizes), "right"))
    if not rows:
        raise RowTooLarge
    in_bytes = np.append(0, np.cumsum(value_sizes))
    return np.diff(in_bytes[np.append(0, ends[:rows])]) + VALUE_BYTES


class _Lists(Column):
    """A column of lists, or of maps, which are lists of pairs."""

    def __init__(self, node: Node, present: _Buffer | None, kind: Any, offsets: _Offsets, values: Column):
        super().__init__(node, present)
        self.type = kind
        self._offsets = offsets
        self._values = values

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        place = self._offsets.place
        offsets = self._offsets.peek(count)
        if offsets[0] > place:
            self._values.skip(int(offsets[0]) - place, limit)
            self._offsets.place = int(offsets[0])
        return _list_sizes(np.diff(offsets), self._values, limit)

    def _read(self, count: int, present: Any) -> Any:
        import pyarrow

        if not count:
            return pyarrow.array([], self.type)
        offsets = self._offsets.take(count)
        values = self._values.take(int(offsets[-1] - offsets[0]))
        starts = (offsets - offsets[0]).astype(self._offsets._dtype)
        buffers = [present, pyarrow.py_buffer(starts)]
        return pyarrow.Array.from_buffers(self.type, count, buffers, children=[values])


class _EqualLists(Column):
    """A column of lists with the same number of values."""

    def __init__(self, node: Node, present: _Buffer | None, kind: Any, length: int, values: Column):
        super().__init__(node, present)
        self.type = kind
        self._length = length
        self._values = values

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        return _list_sizes(np.full(count, self._length, np.int64), self._values, limit)

    def _read(self, count: int, present: Any) -> Any:
        import pyarrow

        values = self._values.take(count * self._length)
        return pyarrow.Array.from_buffers(self.type, count, [present], children=[values])


class _Objects(Column):
    """A column of objects (Arrow: structs)."""

    def __init__(self, node: Node, present: _Buffer | None, kind: Any, members: list[Column]):
        super().__init__(node, present)
        self.type = kind
        self._members = members

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        return sizes_together(self._members, count, limit)

    def _read(self, count: int, present: Any) -> Any:
        import pyarrow

        members = []
        for member in self._members:
            members.append(member.take(count))
        return pyarrow.Array.from_buffers(self.type, count, [present], children=members)


class _Indexed(Column):
    """A column of values of a dictionary, by their index."""

    def __init__(self, node: Node, present: _Buffer | None, indices: Any, values: _Buffer, dictionary: Any):
        super().__init__(node, present)
        self.type = dictionary.values.type
        self._buffer = values
        self._dtype = np.dtype(indices.to_pandas_dtype())
        self._dictionary = dictionary
        self._ahead = np.zeros(0, np.int64)
        self._is_present = np.zeros(0, bool)

    def sizes(self, count: int, limit: RowLimit) -> np.ndarray:
        missing = count - len(self._ahead)
        if missing > 0:
            content = self._buffer.read(missing * self._dtype.itemsize)
            indices = np.frombuffer(content, self._dtype).astype(np.int64)
            is_present = np.ones(missing, bool)
            if self._present is not None:
                is_present = self._present.take(missing)
            self._is_present = np.append(self._is_present, is_present)
            self._ahead = np.append(self._ahead, np.where(is_present, indices, 0))
        indices = self._ahead[:count]
        number = len(self._dictionary.sizes)
        wrong = (indices < 0) | (indices >= max(number, 1))
        if wrong.any() or (not number and self._is_present[:count].any()):
            raise Damaged(f"a row has the value {indices[wrong][:1].tolist()} of a dictionary of {number:,}")
        if not number:
            return np.full(count, VALUE_BYTES, np.int64)
        return self._dictionary.sizes[indices]

    def take(self, count: int) -> Any:
        import pyarrow

        self.check(count)
        self.sizes(count, RowLimit(0, 0))
        self.left -= count
        indices = self._ahead[:count]
        is_present = self._is_present[:count]
        self._ahead = self._ahead[count:]
        self._is_present = self._is_present[count:]
        return self._dictionary.values.take(pyarrow.array(indices, mask=~is_present))

    def _read(self, count: int, present: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class DictionaryType:
    """Type of a dictionary's values."""

    kind: Any
    """pyarrow's type."""
    flat: FlatTable
    """The field in the schema's flatbuffer that the dictionary belongs to."""


@dataclass
class Dictionary:
    """Values that rows refer to."""

    values: Any
    """pyarrow Array."""
    sizes: np.ndarray
    """Bytes of each value in memory, int64 [values]."""


def sizes_together(columns: list[Column], count: int, limit: RowLimit) -> np.ndarray:
    """Return the bytes of the next rows in all the columns, as `Column.sizes` does."""
    total = np.full(count, VALUE_BYTES, np.int64)
    for column in columns:
        column.check(count)
        sizes = column.sizes(len(total), limit)
        total = total[: len(sizes)] + sizes
    return total


@dataclass
class ColumnBuilder:
    """Maker of the columns of one batch, in the order of its arrays and buffers."""

    file: IO[bytes]
    message: BatchMessage
    dictionaries: dict[int, Dictionary]
    _nodes: int = field(default=0, init=False)
    _buffers: int = field(default=0, init=False)
    _views: int = field(default=0, init=False)

    def _node(self) -> Node:
        if self._nodes >= len(self.message.nodes):
            raise Damaged(f"a batch has {len(self.message.nodes)} arrays, fewer than its schema")
        node = self.message.nodes[self._nodes]
        self._nodes += 1
        return node

    def _buffer(self) -> _Buffer:
        if self._buffers >= len(self.message.buffers):
            raise Damaged(f"a batch has {len(self.message.buffers)} buffers, fewer than its schema")
        part = self.message.buffers[self._buffers]
        self._buffers += 1
        return _Buffer(self.file, part, self.message.codec)

    def column(self, kind: Any, flat: FlatTable) -> Column:
        """Make the next column.

        Args:
          kind: pyarrow's type.
          flat: its field in the schema's flatbuffer.

        Raises Damaged for a type that cannot be read in parts, and for a batch that contradicts its schema.
        """
        import pyarrow

        if isinstance(kind, pyarrow.BaseExtensionType):
            return self.column(kind.storage_type, flat)
        encoding = flat.table(4)
        if encoding is not None:
            return self._indexed(kind, encoding.value(0, "<q"))
        return self.values(kind, flat)

    def values(self, kind: Any, flat: FlatTable) -> Column:
        """Make the next column, which has its values in its own buffers: also that of a dictionary."""
        import pyarrow

        types = pyarrow.types
        node = self._node()
        if types.is_null(kind):
            return _Missing(node)
        if types.is_union(kind) or types.is_run_end_encoded(kind) or _is_view(kind):
            raise Damaged(f"its column of type {kind} cannot be read: write it as text, numbers, lists or objects")
        present = self._buffer()
        if types.is_string(kind) or types.is_binary(kind):
            return _Texts(node, present, kind, _Offsets(self._buffer(), np.int32), self._buffer())
        if types.is_large_string(kind) or types.is_large_binary(kind):
            return _Texts(node, present, kind, _Offsets(self._buffer(), np.int64), self._buffer())
        members = flat.tables(5)
        if types.is_struct(kind):
            return self._objects(node, present, kind, members)
        if not types.is_nested(kind):
            return _Numbers(node, present, kind, self._buffer())
        if len(members) != 1:
            raise Damaged(f"its column of type {kind} has {len(members)} members")
        if types.is_fixed_size_list(kind):
            values = self.column(kind.value_type, members[0])
            return _EqualLists(node, present, pyarrow.list_(values.type, kind.list_size), kind.list_size, values)
        dtype = np.int64 if types.is_large_list(kind) else np.int32
        offsets = _Offsets(self._buffer(), dtype)
        if types.is_map(kind):
            values = self.column(pyarrow.struct([kind.key_field, kind.item_field]), members[0])
            pairs = pyarrow.map_(values.type.field(0).type, values.type.field(1).type)
            return _Lists(node, present, pairs, offsets, values)
        values = self.column(kind.value_type, members[0])
        of = pyarrow.large_list if types.is_large_list(kind) else pyarrow.list_
        return _Lists(node, present, of(values.type), offsets, values)

    def _objects(self, node: Node, present: _Buffer, kind: Any, flats: list[FlatTable]) -> Column:
        import pyarrow

        if len(flats) != kind.num_fields:
            raise Damaged(f"its column of type {kind} has {len(flats)} members")
        members = []
        named = []
        for i in range(kind.num_fields):
            member = self.column(kind.field(i).type, flats[i])
            members.append(member)
            named.append(pyarrow.field(kind.field(i).name, member.type))
        return _Objects(node, present, pyarrow.struct(named), members)

    def _indexed(self, kind: Any, number: int) -> Column:
        node = self._node()
        present = self._buffer()
        values = self._buffer()
        if number not in self.dictionaries:
            raise Damaged(f"a batch needs the dictionary {number}, which does not stand before it")
        return _Indexed(node, present, kind.index_type, values, self.dictionaries[number])

    def skip(self, kind: Any) -> None:
        """Pass a column that is not read."""
        import pyarrow

        types = pyarrow.types
        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        self._nodes += 1
        self._buffers += _own_buffers(kind)
        if _is_text_view(kind):
            if self._views >= len(self.message.views):
                raise Damaged("a batch lacks the number of buffers of a column of views")
            self._buffers += self.message.views[self._views]
            self._views += 1
        if types.is_run_end_encoded(kind):
            self.skip(kind.run_end_type)
            self.skip(kind.value_type)
        elif types.is_map(kind):
            self.skip(pyarrow.struct([kind.key_field, kind.item_field]))
        elif types.is_nested(kind):
            for i in range(kind.num_fields):
                self.skip(kind.field(i).type)


def _own_buffers(kind: Any) -> int:
    """Return the number of buffers of an array of a type, without its members and data of views."""
    import pyarrow

    types = pyarrow.types
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        return 0
    if types.is_union(kind):
        return 2 if kind.mode == "dense" else 1
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    texts = types.is_string(kind) or types.is_binary(kind)
    if texts or types.is_large_string(kind) or types.is_large_binary(kind) or _is_list_view(kind):
        return 3
    return 2


def _is_text_view(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_string_view(kind) or pyarrow.types.is_binary_view(kind)


def _is_list_view(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_list_view(kind) or pyarrow.types.is_large_list_view(kind)


def _is_view(kind: Any) -> bool:
    return _is_text_view(kind) or _is_list_view(kind)


class ArrowReader:
    """Reader of the rows of an Arrow file or stream.

    Args:
      path: the file, which names it to pyarrow.
      file: the same, open for reading.
      chosen: names of the columns to read; empty: all.
    """

    def __init__(self, path: Path, file: IO[bytes], chosen: Callable[[Sequence[str]], Sequence[str]], limit: RowLimit):
        self._file = file
        self._messages = ArrowMessages(path, file)
        self._limit = limit
        schema = self._messages.schema
        self._chosen = list(chosen(schema.names)) or schema.names
        self._dictionaries: dict[int, Dictionary] = {}
        self._types: dict[int, DictionaryType] = {}
        for i in range(len(schema)):
            if schema.field(i).name in self._chosen:
                self._find_dictionaries(schema.field(i).type, self._messages.fields[i])
        self.row: int = 0
        """Number of the row that is read next, in the file."""

    def _find_dictionaries(self, kind: Any, flat: FlatTable) -> None:
        """Note the type of each dictionary of a column."""
        import pyarrow

        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        encoding = flat.table(4)
        if encoding is not None:
            kind = kind.value_type
            self._types[encoding.value(0, "<q")] = DictionaryType(kind, flat)
        members = flat.tables(5)
        if pyarrow.types.is_nested(kind) and len(members) != kind.num_fields:
            raise Damaged(f"its column of type {kind} has {len(members)} members")
        if pyarrow.types.is_nested(kind):
            for i in range(kind.num_fields):
                self._find_dictionaries(kind.field(i).type, members[i])

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows as pyarrow RecordBatches of `BATCH_BYTES` bytes at most, or of one row.

        Raises Damaged for a file that contradicts itself, and RowTooLarge for a row beyond the limit.
        """
        for message in self._messages:
            if message.dictionary is None:
                yield from self._rows(message)
            elif message.dictionary in self._types:
                self._add_dictionary(message, message.dictionary)

    def _rows(self, message: BatchMessage) -> Iterator[Any]:
        import pyarrow

        schema = self._messages.schema
        builder = ColumnBuilder(self._file, message, self._dictionaries)
        columns = []
        names = []
        for i in range(len(schema)):
            if schema.field(i).name in self._chosen:
                columns.append(builder.column(schema.field(i).type, self._messages.fields[i]))
                names.append(schema.field(i).name)
            else:
                builder.skip(schema.field(i).type)
        for column in columns:
            if column.left != message.length:
                raise Damaged(f"a column has {column.left:,} rows, and its batch {message.length:,}")
        left = message.length if columns else 0
        count = BLOCK
        while left:
            sizes = sizes_together(columns, min(left, count), self._limit)
            rows = self._limit.fitting(sizes)
            arrays = []
            for column in columns:
                arrays.append(column.take(rows))
            batch = pyarrow.RecordBatch.from_arrays(arrays, names=names)
            batch.validate(full=True)
            yield batch
            self.row += rows
            left -= rows
            count = min(BLOCK, 2 * rows)

    def _add_dictionary(self, message: BatchMessage, number: int) -> None:
        import pyarrow

        of = self._types[number]
        builder = ColumnBuilder(self._file, message, self._dictionaries)
        column = builder.values(of.kind, of.flat)
        if column.left != message.length:
            raise Damaged(f"a dictionary has {column.left:,} values, and its batch {message.length:,}")
        parts = []
        earlier = self._dictionaries.pop(number, None)
        if message.is_delta and earlier is not None:
            parts.append(earlier.values)
        total = 0
        for dictionary in self._dictionaries.values():
            total += int(dictionary.sizes.sum())
        for part in parts:
            total += int(array_sizes(part, self._limit).sum())
        while column.left:
            sizes = column.sizes(min(column.left, BLOCK), self._limit)
            total += int(sizes.sum())
            if total > self._limit.row_bytes:
                raise RowTooLarge
            parts.append(column.take(len(sizes)))
        values = pyarrow.nulls(0, column.type)
        if parts:
            values = pyarrow.concat_arrays(parts)
        values.validate(full=True)
        self._dictionaries[number] = Dictionary(values, array_sizes(values, self._limit))
