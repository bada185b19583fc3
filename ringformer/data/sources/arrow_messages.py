"""Messages of Arrow IPC files and streams: where the buffers of each batch are, before any of them is read.

A file is the magic ARROW1, a stream, and a footer. A stream is a schema, and then batches of dictionaries and of rows;
each has a header, which is a flatbuffer, and a body of buffers. Format:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ringformer.data.sources.row_sizes import Damaged

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
"""First word of a message; streams of Arrow before 0.15 lack it."""
MOST_HEADER = 2**26
"""Most bytes of a message's header."""
SCHEMA = 1
DICTIONARY = 2
ROWS = 3
"""Types of a header."""
CODECS = ("lz4", "zstd")
"""Compression of buffers, by the number in a batch's header; pyarrow's names."""


@dataclass(frozen=True)
class Range:
    """Consecutive bytes of a file."""

    start: int
    size: int


@dataclass(frozen=True)
class Node:
    """One array of a batch."""

    length: int
    nulls: int


@dataclass(frozen=True)
class BatchMessage:
    """A batch of rows, or of a dictionary's values."""

    length: int
    nodes: list[Node]
    buffers: list[Range]
    views: list[int]
    """Number of data buffers of each array of views."""
    codec: str
    """Compression of the buffers, a name of `CODECS`; empty: none."""
    dictionary: int | None = None
    """Number of the dictionary that has these values; None: rows."""
    is_delta: bool = False
    """True if the values continue the dictionary."""


@dataclass(frozen=True)
class FlatTable:
    """A table of a flatbuffer. Every place in it is checked before it is read."""

    content: bytes
    place: int

    def number(self, layout: str, place: int) -> int:
        """Read a number with a layout of `struct`, at a place of the flatbuffer."""
        if not 0 <= place <= len(self.content) - struct.calcsize(layout):
            raise Damaged(f"the header of a message points to byte {place:,} of {len(self.content):,}")
        (number,) = struct.unpack_from(layout, self.content, place)
        return number

    def field(self, index: int) -> int | None:
        """Return the place of a field; None if the table lacks it."""
        names = self.place - self.number("<i", self.place)
        entry = 4 + 2 * index
        if entry >= self.number("<H", names):
            return None
        offset = self.number("<H", names + entry)
        if not offset:
            return None
        return self.place + offset

    def value(self, index: int, layout: str, default: int = 0) -> int:
        """Return a number."""
        place = self.field(index)
        if place is None:
            return default
        return self.number(layout, place)

    def table(self, index: int) -> "FlatTable | None":
        """Return a table."""
        place = self.field(index)
        if place is None:
            return None
        return FlatTable(self.content, place + self.number("<I", place))

    def items(self, index: int, size: int) -> list[int]:
        """Return the places of a vector's items of `size` bytes each."""
        place = self.field(index)
        if place is None:
            return []
        vector = place + self.number("<I", place)
        count = self.number("<I", vector)
        first = vector + 4
        if first + count * size > len(self.content):
            raise Damaged(f"the header of a message has a list of {count:,} items, and {len(self.content):,} bytes")
        return list(range(first, first + count * size, size))

    def tables(self, index: int) -> list["FlatTable"]:
        """Return a vector of tables."""
        tables = []
        for place in self.items(index, 4):
            tables.append(FlatTable(self.content, place + self.number("<I", place)))
        return tables


class ArrowMessages:
    """Messages of an Arrow file or stream. Iterating yields its batches in order.

    Raises Damaged if the file is no Arrow file, if it was cut, or if a header contradicts the file.
    """

    def __init__(self, path: Path, file: IO[bytes]):
        import pyarrow

        self._file = file
        self._end = os.fstat(file.fileno()).st_size
        self._has_footer = file.read(len(MAGIC)) == MAGIC
        self._place = 0
        if self._has_footer:
            self._place = 8
            with pyarrow.OSFile(str(path)) as whole:
                footer = pyarrow.ipc.open_file(whole)
                self._batches: int = footer.num_record_batches
        header = self._header()
        if header is None:
            raise Damaged("it has no schema")
        message = self._message(header)
        if message.value(1, "<B") != SCHEMA:
            raise Damaged("it does not begin with a schema")
        words = struct.pack("<II", CONTINUATION, len(header)) + header
        self.schema: Any = pyarrow.ipc.read_schema(pyarrow.py_buffer(words))
        """The columns, a pyarrow Schema."""
        schema = message.table(2)
        if schema is None or schema.value(0, "<h"):
            raise Damaged("its numbers are big-endian: write it again on a little-endian machine")
        self.fields: list[FlatTable] = schema.tables(1)
        """The columns' fields in the flatbuffer, which have the numbers of dictionaries."""
        if len(self.fields) != len(self.schema):
            raise Damaged(f"its schema has {len(self.fields)} columns and {len(self.schema)}")

    def __iter__(self) -> Iterator[BatchMessage]:
        batches = 0
        while True:
            header = self._header()
            if header is None:
                break
            message = self._message(header)
            size = message.value(3, "<q")
            body = Range(self._place, size)
            if not 0 <= size <= self._end - self._place:
                raise Damaged(f"a batch of {size:,} bytes begins at byte {self._place:,} of {self._end:,}: it was cut")
            self._place += size
            batch = _batch(message, body)
            batches += batch.dictionary is None
            yield batch
        if self._has_footer and batches != self._batches:
            raise Damaged(f"it has {batches:,} batches, and its footer names {self._batches:,}")

    def _header(self) -> bytes | None:
        """Return the next message's header; None at the end of the stream."""
        size = self._word()
        if size == CONTINUATION:
            size = self._word()
        if not size:
            return None
        if size > min(MOST_HEADER, self._end - self._place):
            raise Damaged(f"a header of {size:,} bytes begins at byte {self._place:,} of {self._end:,}: it was cut")
        self._file.seek(self._place)
        header = self._file.read(size)
        self._place += size
        return header

    def _word(self) -> int:
        self._file.seek(self._place)
        word = self._file.read(4)
        if len(word) != 4:
            raise Damaged("the stream does not end, it was cut")
        self._place += 4
        return int.from_bytes(word, "little")

    def _message(self, header: bytes) -> FlatTable:
        root = FlatTable(header, 0)
        return FlatTable(header, root.number("<I", 0))


def _batch(message: FlatTable, body: Range) -> BatchMessage:
    kind = message.value(1, "<B")
    if kind not in (DICTIONARY, ROWS):
        raise Damaged(f"a message has the type {kind}; a batch has {DICTIONARY} or {ROWS}")
    table = message.table(2)
    dictionary = None
    is_delta = False
    if kind == DICTIONARY and table is not None:
        dictionary = table.value(0, "<q")
        is_delta = table.value(2, "<B") != 0
        table = table.table(1)
    if table is None:
        raise Damaged("a message has no batch")
    length = table.value(0, "<q")
    nodes = []
    for place in table.items(1, 16):
        node = Node(table.number("<q", place), table.number("<q", place + 8))
        if node.length < 0 or not 0 <= node.nulls <= node.length:
            raise Damaged(f"an array has {node.length:,} values, and {node.nulls:,} of them are missing")
        nodes.append(node)
    buffers = []
    for place in table.items(2, 16):
        start = table.number("<q", place)
        size = table.number("<q", place + 8)
        if start < 0 or size < 0 or start + size > body.size:
            raise Damaged(f"a buffer of {size:,} bytes begins at byte {start:,} of a batch of {body.size:,}")
        buffers.append(Range(body.start + start, size))
    codec = ""
    compression = table.table(3)
    if compression is not None:
        number = compression.value(0, "<b")
        if not 0 <= number < len(CODECS) or compression.value(1, "<b"):
            raise Damaged(f"a batch has the unknown compression {number}")
        codec = CODECS[number]
    views = []
    for place in table.items(4, 8):
        views.append(table.number("<q", place))
    return BatchMessage(length, nodes, buffers, views, codec, dictionary, is_delta)
