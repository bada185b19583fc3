"""Files of text, decoded: whole or by lines, and the error that names all files of a source that cannot be decoded."""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from ringformer.data.sources.malformed import SKIP
from ringformer.data.sources.source_files import open_file
from ringformer.data.sources.text_encoding import (
    HEAD,
    MARKED,
    Undecodable,
    byte_order_mark,
    decode,
    is_binary,
    is_wide,
    wide_encoding,
)

NAMED = 20
"""Most files that an error names."""


class Binary(ValueError):
    """A file that is no text."""


def read_bytes(path: Path, max_bytes: int | None) -> bytes:
    """Read a file, decompressed. Raises ValueError if it has more than `max_bytes` bytes."""
    with open_file(path) as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    check_size(str(path), len(content), max_bytes)
    return content


def check_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raise ValueError if a document of `size` bytes has more than `max_bytes` bytes."""
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"{name} has more than max_document_bytes={max_bytes:,} bytes of text: split it, or raise "
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


def lines_of(path: Path, encodings: Sequence[str]) -> Iterator[str | Undecodable]:
    """Read the lines of a file one by one, each with the first encoding that decodes it; yield the fault of a line that
    none decodes.

    A file of UTF-16 or UTF-32 is decoded as a whole. Raises Undecodable if its encoding is not in the list.
    """
    with open_file(path) as file:
        head = cast(io.BufferedReader, file).peek(HEAD)[:HEAD]
        if byte_order_mark(head) or wide_encoding(head, encodings):
            yield from io.StringIO(decode(file.read(), encodings), newline="\n")
            return
        offset = 0
        for line in file:
            try:
                yield decode(line, encodings, offset)
            except Undecodable as fault:
                yield fault
            offset += len(line)


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
