"""Files of text, decoded: whole or by lines, and the error that names all files of a source that cannot be decoded."""

import codecs
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from ringformer.data.sources.malformed import SKIP
from ringformer.data.sources.row_sizes import RECORD_BYTES, record_bytes
from ringformer.data.sources.source_files import open_file
from ringformer.data.sources.text_encoding import (
    HEAD,
    MARKED,
    PART,
    SAMPLE,
    Undecodable,
    byte_order_mark,
    decode,
    fault_in_head,
    is_binary,
    is_wide,
    wide_encoding,
)

NAMED = 20
"""Most files that an error names."""


class Binary(ValueError):
    """A file that is no text."""


class TooLarge(ValueError):
    """A document or a record beyond the limit."""


def read_bytes(path: Path, max_bytes: int | None) -> bytes:
    """Read a file, decompressed. Raises ValueError if it has more than `max_bytes` bytes."""
    with open_file(path) as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    check_size(str(path), len(content), max_bytes)
    return content


def check_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raise ValueError if a document of `size` bytes has more than `max_bytes` bytes."""
    if max_bytes is not None and size > max_bytes:
        raise too_large(name, max_bytes, "bytes of text")


def too_large(name: str, max_bytes: int, what: str) -> TooLarge:
    """Return the error for a document or record of more than `max_bytes` bytes.

    Args:
      what: what is counted.
    """
    return TooLarge(
        f"{name} has more than max_document_bytes={max_bytes:,} {what}: split it, or raise "
        "--max_document_bytes (for a run: --config.data.max_document_bytes)"
    )


def read_text(path: Path, encodings: Sequence[str], max_bytes: int | None) -> str:
    """Read a file as text.

    Raises Binary for a file that is no text, Undecodable for one in none of the encodings, and ValueError for one of
    more than `max_bytes` bytes.
    """
    content = read_bytes(path, max_bytes)
    if is_binary(content, encodings):
        raise Binary(f"{path} is binary")
    return decode(content, encodings)


def lines_of(path: Path, encodings: Sequence[str], max_bytes: int | None = None) -> Iterator[str | Undecodable]:
    """Read the lines of a file one by one, each with the first encoding that decodes it; yield the fault of a line that
    none decodes.

    A file of UTF-16 or UTF-32 has one encoding. Raises Undecodable if it is not in the list, and ValueError for a line
    of more than `max_bytes` and `RECORD_BYTES` bytes, which is not read; None: no limit.
    """
    most = record_bytes(max_bytes)
    with open_file(path) as file:
        head = cast(io.BufferedReader, file).peek(HEAD)[:HEAD]
        if byte_order_mark(head) or wide_encoding(head, encodings):
            yield from _lines_of_text(path, encodings, max_bytes)
            return
        offset = 0
        number = 0
        while True:
            number += 1
            line = _line(file, most)
            size = len(line)
            if not size:
                return
            if size > most:
                check_record(f"{path}:{number}", size, max_bytes)
            try:
                text: str | Undecodable = decode(line, encodings, offset)
            except Undecodable as fault:
                text = fault
            del line  # while the text is parsed, its bytes would take memory
            yield text
            del text
            offset += size


def _line(file: IO[bytes], most: int) -> bytes | bytearray:
    """Read the next line, or its first `most + 1` bytes. A long one is read in parts, because `readline` copies it."""
    part = file.readline(min(PART, most + 1))
    if len(part) < PART or part.endswith(b"\n"):
        return part
    line = bytearray(part)
    while len(line) <= most:
        part = file.readline(min(PART, most + 1 - len(line)))
        line += part
        if not part or part.endswith(b"\n"):
            break
    return line


def _lines_of_text(path: Path, encodings: Sequence[str], max_bytes: int | None) -> Iterator[str]:
    """Read the lines of a file with one encoding."""
    most = record_bytes(max_bytes)
    number = 0
    with open_text(path, encodings) as file:
        while True:
            number += 1
            line = file.readline(most + 1)
            if not line:
                return
            check_record(f"{path}:{number}", len(line), max_bytes)
            yield line


def check_record(name: str, size: int, max_bytes: int | None) -> None:
    """Raise ValueError if a record of `size` bytes is larger than `record_bytes`."""
    if max_bytes is not None and size > record_bytes(max_bytes):
        raise too_large(name, max_bytes, f"bytes, and {RECORD_BYTES:,} for all else in its record")


@contextmanager
def open_text(path: Path, encodings: Sequence[str]) -> Iterator[io.TextIOWrapper]:
    """Open a file for reading as text, decompressed, without its byte order mark. Lines end at "\\n", and ends of
    lines are kept.

    The file is decoded once before, in parts, to choose the first encoding that can. Raises Undecodable if none can.
    """
    encoding = _encoding_of(path, encodings)
    with open_file(path) as file:
        text = io.TextIOWrapper(cast(io.BufferedReader, file), encoding=encoding, newline="\n")
        mark = "\ufeff".encode(encoding, "ignore")
        begins = cast(io.BufferedReader, file).peek(HEAD)
        if mark and begins.startswith(mark) and encoding not in MARKED:
            text.read(1)
        yield text


def _encoding_of(path: Path, encodings: Sequence[str]) -> str:
    """Return the first encoding that decodes a file. Raises Undecodable, with the first fault in the first encoding."""
    with open_file(path) as file:
        head = file.read(HEAD)
    faults = []
    for encoding in encodings:
        fault = fault_in_head(head, encoding, encodings)
        if fault is None:
            fault = _first_fault(path, encoding)
        if fault is None:
            return encoding
        faults.append(fault)
    at = faults[0]
    start = max(at - SAMPLE, 0) // 4 * 4
    with open_file(path) as file:
        _skip(file, start)
        content = file.read(at - start + SAMPLE)
    raise Undecodable(content, at - start, encodings, start, head)


def _first_fault(path: Path, encoding: str) -> int | None:
    """Return the place of the first byte that an encoding cannot decode; None if it decodes the whole file."""
    decoder = codecs.getincrementaldecoder(encoding)()
    place = 0
    with open_file(path) as file:
        while True:
            content = file.read(PART)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                return place - pending + error.start
            if not content:
                return None
            place += len(content)


def _skip(file: IO[bytes], size: int) -> None:
    while size:
        part = file.read(min(size, PART))
        if not part:
            return
        size -= len(part)


def undecodable_files(paths: Sequence[Path], encodings: Sequence[str], *, by_line: bool = False) -> ValueError:
    """Return the error that names all files that are in none of the encodings, with the offset of the first fault and
    the likely encoding.

    Args:
      paths: files to read, of which at least one cannot be decoded.
      by_line: True if each line may have an encoding of its own.
    """
    lines = []
    likely: Counter[str] = Counter()
    for path in paths:
        fault = _fault(path, encodings, by_line)
        if fault is not None:
            lines.append(f"{path}: {fault}")
            likely[fault.likely] += 1
    faults = len(lines)
    marked = [name for name in likely if name in MARKED]
    ordered = [name for name in likely if is_wide(name) and name not in MARKED]
    others = [name for name, _ in likely.most_common() if not is_wide(name)]
    advised = ",".join([*encodings, *marked, *others[:1], *ordered])  # utf-16-le reads the others' files, too
    if faults > NAMED:
        lines = [*lines[:NAMED], f"... and {faults - NAMED} more"]
    if len(others) > 1:
        lines.append(f"{' and '.join(others)} decode each other's files: convert those of all but one to UTF-8 (iconv)")
    lines.append(
        f"List the encodings to try, in this order: --encoding={advised} (for a run: --config.data.encoding={advised}),"
        f" or skip and count what cannot be decoded: {SKIP}"
    )
    named = "\n".join(lines)
    return ValueError(f"{faults} of the {len(paths)} files still to be read cannot be decoded:\n{named}")


def _fault(path: Path, encodings: Sequence[str], by_line: bool) -> Undecodable | None:
    try:
        if not by_line:
            read_text(path, encodings, None)
            return None
        for line in lines_of(path, encodings):
            if isinstance(line, Undecodable):
                return line
    except Undecodable as fault:
        return fault
    except Binary:
        return None
    return None
