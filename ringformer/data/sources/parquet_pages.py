"""Pages of a Parquet file: their sizes, numbers of values and longest rows, before pyarrow reads any of them.

pyarrow reads a page whole, and a row whole; the file's footer may declare other sizes than its pages have. Format:
https://parquet.apache.org/docs/file-format/
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from ringformer.data.sources.row_sizes import BATCH_BYTES, Damaged, RowLimit, RowTooLarge

MOST_ROWS = 1024
"""Most rows of a batch."""
PAGE_BYTES = 2**25
"""Bytes that a page may have beyond the limit of a document."""
PACKED_TIMES = 32
"""Times that a page of several documents may be larger than compressed, if it is larger than a document may be."""
MOST_DEPTH = 8
"""Deepest structure of a page's header."""
GROUPS = 2**15
"""Groups of eight levels to unpack at a time."""
NUMBER_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}
CODE_BYTES = 4
"""Bytes of a text that is read as the number of a dictionary's value."""
LEVEL_BYTES = 4
"""Bytes of the levels of each value."""

_TYPE = 1
_UNCOMPRESSED = 2
_COMPRESSED = 3
_DATA = 5
_DICTIONARY = 7
_DATA_V2 = 8
"""Fields of a page's header."""


@dataclass(frozen=True)
class Page:
    """A page of a column."""

    start: int
    """Place in the file behind its header."""
    compressed: int
    uncompressed: int
    """Bytes of the page in the file, and in memory."""
    values: int
    is_dictionary: bool
    level_bytes: int | None
    """Bytes of repetition levels at its beginning, which are not compressed; None: they are part of its content."""


class _Compact:
    """Structures in Thrift's compact protocol, of which only numbers and structures are kept."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def structure(self, depth: int = 0) -> dict[int, Any]:
        """Read a structure: the values by the number of their field."""
        if depth > MOST_DEPTH:
            raise Damaged("the header of a page is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while True:
            head = self._byte()
            kind = head & 15
            if not kind:
                return fields
            if head >> 4:
                number += head >> 4
            else:
                number = self._signed()
            if kind in (1, 2):  # true and false have no content
                fields[number] = kind == 1
            else:
                fields[number] = self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._unsigned())
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.structure(depth + 1)
        raise Damaged(f"the header of a page has a value of type {kind}")

    def _list(self, depth: int) -> None:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._unsigned()
        if depth > MOST_DEPTH:
            raise Damaged("the header of a page is nested too deeply")
        for _ in range(count):
            self._value(head & 15, depth + 1)

    def _byte(self) -> int:
        content = self._file.read(1)
        if not content:
            raise Damaged("the file ends in the header of a page")
        return content[0]

    def _skip(self, size: int) -> None:
        self._file.seek(size, 1)

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise Damaged("the header of a page has a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)


def pages_of(file: IO[bytes], chunk: Any) -> Iterator[Page]:
    """Yield the pages of a column in a row group.

    Args:
      chunk: pyarrow's ColumnChunkMetaData.

    Raises Damaged for a header that cannot be read, or that contradicts itself.
    """
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < place:
        place = chunk.dictionary_page_offset
    if place < 0:
        raise Damaged(f"a column begins at byte {place:,}")
    end = place + chunk.total_compressed_size
    values = 0
    while place < end and values < chunk.num_values:
        file.seek(place)
        header = _Compact(file).structure()
        page = _page(header, file.tell())
        place = page.start + page.compressed
        if not page.is_dictionary:
            values += page.values
        yield page


def _page(header: dict[int, Any], start: int) -> Page:
    number_of_values = 1
    levels = 3
    is_dictionary = _DICTIONARY in header
    is_second_version = _DATA_V2 in header
    body = header.get(_DATA) or header.get(_DATA_V2) or header.get(_DICTIONARY) or {}
    compressed = header.get(_COMPRESSED, -1)
    uncompressed = header.get(_UNCOMPRESSED, -1)
    values = body.get(number_of_values, 0)
    level_bytes = None
    if is_second_version:
        level_bytes = body.get(levels + 3, 0)
    for number in (compressed, uncompressed, values, level_bytes or 0):
        if type(number) is not int or number < 0:
            raise Damaged(f"a page at byte {start:,} has {values} values in {compressed} of {uncompressed} bytes")
    return Page(start, compressed, uncompressed, values, is_dictionary, level_bytes)


@dataclass
class _LongestRow:
    """Longest row of a column of lists, found in the repetition levels, which are 0 where a row begins."""

    values: int = 0
    """Most values of a row."""
    page_bytes: int = 0
    """Most bytes of the pages that lie within one row."""
    _current: int = 0
    _current_bytes: int = 0
    _begins: bool = False

    def begin_page(self) -> None:
        self._begins = False

    def end_page(self, page: Page) -> None:
        """Count the bytes of a page in which no row began for the row that it lies in."""
        if self._begins:
            self._current_bytes = 0
        else:
            self._current_bytes += page.uncompressed
        self.page_bytes = max(self.page_bytes, self._current_bytes)

    def add(self, levels: np.ndarray) -> None:
        """Go on with the levels of more values."""
        starts = np.flatnonzero(levels == 0)
        if not len(starts):
            self.add_equal(1, len(levels))
            return
        self._begins = True
        first = self._current + int(starts[0])
        within = int(np.diff(starts).max(initial=0))
        self._current = len(levels) - int(starts[-1])
        self.values = max(self.values, first, within, self._current)

    def add_equal(self, level: int, count: int) -> None:
        """Go on with `count` values of the same level."""
        if level:
            self._current += count
        elif count:
            self._begins = True
            self._current = 1
        self.values = max(self.values, self._current)


def _add_levels(longest: _LongestRow, content: memoryview, width: int, values: int) -> None:
    """Go on with the levels of a page, in Parquet's hybrid of runs and packed groups of eight.

    Args:
      width: bits of a level.
    """
    place = 0
    while values > 0:
        head = 0
        shift = 0
        while True:
            if place >= len(content) or shift > 35:
                raise Damaged(f"the levels of a page end before {values:,} of its values")
            byte = content[place]
            head |= (byte & 127) << shift
            place += 1
            shift += 7
            if byte < 128:
                break
        if head & 1:
            for first in range(0, head >> 1, GROUPS):
                groups = min(GROUPS, (head >> 1) - first)
                packed = content[place : place + groups * width]
                bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
                levels = np.any(bits[: len(bits) // width * width].reshape(-1, width), axis=1)
                longest.add(levels[:values])
                place += len(packed)
                values -= min(len(levels), values)
                if len(packed) < groups * width:
                    break
        else:
            count = min(head >> 1, values)
            size = (width + 7) // 8
            longest.add_equal(int.from_bytes(content[place : place + size], "little"), count)
            place += size
            values -= count


def _levels(file: IO[bytes], page: Page, codec: str) -> memoryview:
    """Return the repetition levels of a page, encoded."""
    import pyarrow

    file.seek(page.start)
    if page.level_bytes is not None:
        return memoryview(file.read(min(page.level_bytes, page.compressed)))
    content: Any = file.read(page.compressed)
    if codec != "UNCOMPRESSED":
        name = {"LZ4": "lz4_raw"}.get(codec, codec.lower())
        content = pyarrow.decompress(content, decompressed_size=page.uncompressed, codec=name)
    view = memoryview(content).cast("B")
    size = int.from_bytes(view[:4], "little")
    return view[4 : 4 + size]


def batch_rows(file: IO[bytes], group: Any, schema: Any, leaves: list[int], limit: RowLimit, most: int | None) -> int:
    """Return how many rows of a row group to read together.

    Args:
      group: pyarrow's RowGroupMetaData.
      schema: pyarrow's ParquetSchema.
      leaves: numbers of the columns to read.
      limit: of a row.
      most: most bytes of a document; None: no limit.

    Raises Damaged for a page that contradicts itself, and RowTooLarge for a page or a row that is beyond the limit.
    """
    rows = MOST_ROWS
    for leaf in leaves:
        rows = min(rows, _leaf_rows(file, group, schema, leaf, limit, most))
    return max(rows, 1)


def _leaf_rows(file: IO[bytes], group: Any, schema: Any, leaf: int, limit: RowLimit, most: int | None) -> int:
    """Return how many rows of one column to read together; 0 if even one is more than a batch should have."""
    chunk = group.column(leaf)
    column = schema.column(leaf)
    pages = []
    largest = 0
    total = 0
    values = 0
    rows = MOST_ROWS
    for page in pages_of(file, chunk):
        if most is not None:
            _check_page(page, chunk.path_in_schema, most)
        pages.append(page)
        largest = max(largest, page.uncompressed)
        total += page.uncompressed
        if not page.is_dictionary:
            values += page.values
            rows = min(rows, BATCH_BYTES * page.values // max(page.uncompressed, 1))
    value_bytes = NUMBER_BYTES.get(chunk.physical_type, CODE_BYTES)
    if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
        value_bytes = column.length
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # a value may repeat the beginning of the one before it
        value_bytes = largest
    if not column.max_repetition_level:
        return min(rows, BATCH_BYTES // max(value_bytes, 1))
    if values * (value_bytes + LEVEL_BYTES) <= BATCH_BYTES and total <= BATCH_BYTES:
        return MOST_ROWS
    longest = _LongestRow()
    width = int(column.max_repetition_level).bit_length()
    for page in pages:
        if not page.is_dictionary:
            longest.begin_page()
            _add_levels(longest, _levels(file, page, chunk.compression), width, page.values)
            longest.end_page(page)
    if longest.values * value_bytes > limit.row_bytes or longest.page_bytes > limit.row_bytes:
        raise RowTooLarge(f"a row of {longest.values:,} values in the column {chunk.path_in_schema}")
    of_values = BATCH_BYTES // max(longest.values * (value_bytes + LEVEL_BYTES), 1)
    of_pages = BATCH_BYTES * group.num_rows // max(total, 1)
    return min(MOST_ROWS, of_values, of_pages)


def _check_page(page: Page, column: str, most: int) -> None:
    """Raise RowTooLarge for a page with a document beyond the limit, or one that hides many in few bytes."""
    has_large_document = page.uncompressed > most * max(page.values, 1)
    is_packed = page.uncompressed > PACKED_TIMES * page.compressed
    if page.uncompressed > most + PAGE_BYTES and (has_large_document or is_packed):
        raise RowTooLarge(
            f"a page of {page.uncompressed:,} bytes, {page.compressed:,} compressed, in the column {column}"
        )
