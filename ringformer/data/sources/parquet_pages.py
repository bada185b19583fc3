"""Pages of a Parquet file: their sizes, numbers of values and longest rows, before pyarrow reads any of them.

pyarrow reads a page whole, and a row whole; the file's footer may declare other sizes. The footer is
parsed here too: some faults of its statistics end the process if pyarrow is asked for them. Format:
https://parquet.apache.org/docs/file-format/
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from ringformer.data.sources.row_sizes import BATCH_BYTES, VALUE_BYTES, Damaged, RowLimit, RowTooLarge

MOST_ROWS = 2**13
"""Most rows of a batch."""
PAGE_HEAD = 2**12
"""Bytes of a page besides its values and their levels."""
PACKED_TIMES = 32
PACKED_BYTES = 2**24
"""A page of several values may be so many times larger than compressed, or have so many bytes beyond half the limit of
a document: pyarrow copies it several times."""
MOST_DEPTH = 8
"""Deepest structure of a page's header."""
GROUPS = 2**15
"""Groups of eight levels to unpack at a time."""
CODE_BYTES = 4
"""Bytes of a text that is read as the number of a dictionary's value."""
NUMBER_BYTES = (1, 4, 8, 8, 4, 8, CODE_BYTES)
"""Bytes of a value in memory, by the number of its type: boolean, int32, int64, int96, float, double, text."""
TEXT = 6
SAME_LENGTH = 7
"""Types of texts, and of bytes whose length the schema gives."""
DELTAS = (5, 6, 7)
DELTA_TEXTS = 7
"""Encodings that pyarrow cannot read as numbers of a dictionary's values; the last one, of texts that repeat the
beginning of the one before."""
CODECS = ("", "snappy", "gzip", "lzo", "brotli", "lz4_raw", "zstd", "lz4_raw")
"""pyarrow's names of compressions, by their number."""
MAGIC = b"PAR1"
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


@dataclass(frozen=True)
class Leaf:
    """A column, or a member of one that has no members of its own."""

    path: str
    kind: int
    """Number of its type."""
    length: int
    """Bytes of each value, of the type `SAME_LENGTH`."""
    levels: int
    """Number of lists that its values are in."""


@dataclass(frozen=True)
class Chunk:
    """A column of a row group."""

    leaf: Leaf
    encodings: list[int]
    codec: str
    values: int
    start: int
    size: int
    """Place and bytes in the file."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that are stored together."""

    rows: int
    chunks: list[Chunk]
    """By the number of the leaf."""


class _Compact:
    """Structures in Thrift's compact protocol, as Python's objects; texts are kept if `texts` is set."""

    def __init__(self, file: IO[bytes], texts: bool = False):
        self._file = file
        self._texts = texts

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
            return self._text(self._unsigned())
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.structure(depth + 1)
        raise Damaged(f"the header of a page has a value of type {kind}")

    def _text(self, size: int) -> bytes:
        if not self._texts:
            self._skip(size)
            return b""
        return self._file.read(size)

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._unsigned()
        if depth > MOST_DEPTH:
            raise Damaged("the header of a page is nested too deeply")
        values = []
        for _ in range(count):
            values.append(self._value(head & 15, depth + 1))
        return values

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


def row_groups(file: IO[bytes]) -> list[RowGroup]:
    """Read the footer of a Parquet file. Raises Damaged if it contradicts itself."""
    end = file.seek(0, 2) - 8
    if end < 4:
        raise Damaged("it is too short")
    file.seek(end)
    size = int.from_bytes(file.read(4), "little")
    if file.read(4) != MAGIC or size > end:
        raise Damaged(f"it does not end as one does: its footer would have {size:,} of {end:,} bytes")
    file.seek(end - size)
    try:
        footer = _Compact(io.BytesIO(file.read(size)), texts=True).structure()
        leaves = _leaves(footer[2])
        groups = []
        for group in footer[4]:
            chunks = []
            for leaf, column in zip(leaves, group[1], strict=True):
                chunks.append(_chunk(leaf, column[3]))
            groups.append(RowGroup(group[3], chunks))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"its footer lacks a part, or has another in its place: {error}") from None
    return groups


def _chunk(leaf: Leaf, meta: dict[int, Any]) -> Chunk:
    start = meta[9]
    if 0 < meta.get(11, 0) < start:
        start = meta[11]
    codec = meta[4]
    if start < 0 or not 0 <= codec < len(CODECS):
        raise ValueError(f"a column begins at byte {start:,} and has the compression {codec}")
    if not 0 <= leaf.kind <= SAME_LENGTH or leaf.length < 0 or not isinstance(meta[2], list):
        raise ValueError(f"a column has the type {leaf.kind} with {leaf.length:,} bytes")
    return Chunk(leaf, meta[2], CODECS[codec], meta[5], start, meta[7])


def _leaves(elements: list[dict[int, Any]]) -> list[Leaf]:
    """Return the leaves of a schema, which lists each element before its members."""
    leaves: list[Leaf] = []

    def add(place: int, path: str, levels: int) -> int:
        element = elements[place]
        repeated = 2
        if place:
            name = element[4].decode()
            path = f"{path}.{name}" if path else name
            levels += element.get(3) == repeated
        members = element.get(5, 0)
        place += 1
        if not members:
            leaves.append(Leaf(path, element[1], element.get(2, 0), levels))
        for _ in range(members):
            place = add(place, path, levels)
        return place

    try:
        add(0, "", 0)
    except (IndexError, RecursionError):
        raise ValueError("a schema whose members are not all there") from None
    return leaves


def pages_of(file: IO[bytes], chunk: Chunk) -> Iterator[Page]:
    """Yield the pages of a column in a row group.

    Raises Damaged for a header that cannot be read, or that contradicts itself.
    """
    place = chunk.start
    end = place + chunk.size
    values = 0
    while place < end and values < chunk.values:
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
    if type(body) is not dict:
        raise Damaged(f"the header of the page at byte {start:,} has no number of values")
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
    if codec:
        content = pyarrow.decompress(content, decompressed_size=page.uncompressed, codec=codec)
    view = memoryview(content).cast("B")
    size = int.from_bytes(view[:4], "little")
    return view[4 : 4 + size]


def coded_texts(file: IO[bytes], groups: Sequence[RowGroup]) -> list[str]:
    """Return the leaves to read as numbers of a dictionary's values, so that values are not copied: texts, unless
    pyarrow cannot, or the dictionary itself is larger than a batch."""
    texts: list[str] = []
    others = set()
    for group in groups:
        for chunk in group.chunks:
            if chunk.leaf.kind != TEXT or not set(DELTAS).isdisjoint(chunk.encodings):
                others.add(chunk.leaf.path)
                continue
            if chunk.leaf.path not in texts:
                texts.append(chunk.leaf.path)
            for page in pages_of(file, chunk):
                if page.is_dictionary and page.uncompressed > BATCH_BYTES and not chunk.leaf.levels:
                    others.add(chunk.leaf.path)
                break
    return [text for text in texts if text not in others]


def batch_rows(
    file: IO[bytes], group: RowGroup, chosen: Sequence[str], coded: Sequence[str], limit: RowLimit, most: int | None
) -> int:
    """Return how many rows of a row group to read together.

    Args:
      chosen: names of the columns to read.
      coded: leaves that are read as numbers of a dictionary's values (`coded_texts`).
      limit: of a row.
      most: most bytes of a document; None: no limit.

    Raises Damaged for a page that contradicts itself, and RowTooLarge for a page or a row that is beyond the limit.
    """
    rows = MOST_ROWS
    for chunk in group.chunks:
        path = chunk.leaf.path
        if any(path == name or path.startswith(f"{name}.") for name in chosen):
            is_coded = path in coded
            rows = min(rows, _chunk_rows(file, group.rows, chunk, is_coded, limit, most))
    return max(rows, 1)


def _chunk_rows(
    file: IO[bytes], group_rows: int, chunk: Chunk, is_coded: bool, limit: RowLimit, most: int | None
) -> int:
    """Return how many rows of one column to read together; 0 if even one is more than a batch should have."""
    leaf = chunk.leaf
    pages = []
    largest = 0
    dictionary = 0
    total = 0
    values = 0
    rows = MOST_ROWS
    for page in pages_of(file, chunk):
        if most is not None:
            _check_page(page, leaf.path, most)
        pages.append(page)
        largest = max(largest, page.uncompressed)
        total += page.uncompressed
        if page.is_dictionary:
            dictionary = page.uncompressed
        else:
            values += page.values
            rows = min(rows, BATCH_BYTES * page.values // max(page.uncompressed, 1))
    if leaf.kind == SAME_LENGTH:
        value_bytes = leaf.length
    elif DELTA_TEXTS in chunk.encodings:
        value_bytes = largest
    else:
        value_bytes = NUMBER_BYTES[leaf.kind]
        if leaf.kind == TEXT and not is_coded:
            value_bytes = max(value_bytes, dictionary)
    if not leaf.levels:
        return min(rows, BATCH_BYTES // max(value_bytes, 1))
    if values * (value_bytes + LEVEL_BYTES) <= BATCH_BYTES and total <= BATCH_BYTES:
        return MOST_ROWS
    longest = _LongestRow()
    width = leaf.levels.bit_length()
    for page in pages:
        if not page.is_dictionary:
            longest.begin_page()
            _add_levels(longest, _levels(file, page, chunk.codec), width, page.values)
            longest.end_page(page)
    counted_bytes = max(value_bytes, VALUE_BYTES if leaf.kind == TEXT else limit.number_bytes)
    if longest.values * counted_bytes > limit.row_bytes or longest.page_bytes > limit.row_bytes:
        raise RowTooLarge(f"a row of {longest.values:,} values in the column {leaf.path}")
    of_values = BATCH_BYTES // max(longest.values * (value_bytes + LEVEL_BYTES), 1)
    of_pages = BATCH_BYTES * group_rows // max(total, 1)
    return min(MOST_ROWS, of_values, of_pages)


def _check_page(page: Page, column: str, most: int) -> None:
    """Raise RowTooLarge for a page with a document beyond the limit, or one that hides many in few bytes."""
    has_large_document = page.uncompressed > (most + LEVEL_BYTES + CODE_BYTES) * page.values + PAGE_HEAD
    is_packed = page.uncompressed > max(most // 2 + PACKED_BYTES, PACKED_TIMES * page.compressed)
    is_single = page.values == 1
    if has_large_document or (is_packed and not is_single):
        raise RowTooLarge(
            f"a page of {page.uncompressed:,} bytes, {page.compressed:,} compressed, in the column {column}"
        )
