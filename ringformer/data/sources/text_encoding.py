"""Encodings of files: the first of a list that decodes a file, or the place of the fault and the likely encoding.

UTF-16 and UTF-32 decode almost any bytes, so `utf-16` and `utf-32` need a file that begins with a byte order mark;
`utf-16-le` and the like do not. Single-byte encodings such as latin-1 decode everything: they come last.
"""

import codecs
import re
from collections.abc import Sequence

UTF_8 = ("utf-8",)
"""Encodings of a source that names none."""

EXCERPT = 20
"""Characters before and after a fault that an error shows."""
SAMPLE = 2**14
"""Bytes on each side of a fault from which the likely encoding is guessed."""
ENOUGH = 8
SHARE = 0.3
"""Bytes above 127: with more than so many, and more than this share, statistics of languages tell encodings apart."""
MARKED = ("utf-16", "utf-32")
"""Encodings of files that begin with a byte order mark."""
PART = 2**20
"""Bytes or characters of a long text to look at together."""
HEAD = 2**13
"""Bytes at the beginning of a file in which a zero byte, or the name of an encoding, is sought."""

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WIDE = re.compile(r"utf-(16|32)(-[lb]e)?")
_DECLARED = re.compile(rb"(?:charset|encoding|coding)\s*[:=]\s*[\"']?([\w.-]+)", re.IGNORECASE)


class Undecodable(ValueError):
    """Fault of a file, or of a line, in none of the encodings. `likely` names an encoding that decodes it."""

    def __init__(
        self,
        content: bytes | bytearray,
        at: int,
        encodings: Sequence[str],
        offset: int = 0,
        head: bytes | bytearray | None = None,
    ):
        self.likely: str = likely_encoding(content, at, content[:HEAD] if head is None else head)
        start = max(at - EXCERPT, 0)
        end = at + EXCERPT
        if is_wide(self.likely):
            start = 0
            end = 4 * EXCERPT
        shown = content[start:end].decode(self.likely, "ignore")
        place = f"byte {content[at]:#04x} at {offset + at:,}"
        super().__init__(f"{place} is not {' or '.join(encodings)}; likely {self.likely}: {shown!r}")


def parse_encodings(text: str) -> tuple[str, ...]:
    """Parse encodings such as "utf-8,cp1252"; UTF-8 for an empty text. Raises ValueError for one that Python does not
    know."""
    encodings = []
    for part in text.split(","):
        name = part.strip().lower().replace("_", "-")
        if not name:
            continue
        try:
            "".encode(name)
        except LookupError:
            examples = "utf-8, utf-16, cp1252, latin-1"
            raise ValueError(f"encoding {name!r} is unknown; known are Python's, such as {examples}") from None
        usual = codecs.lookup(name).name
        if is_wide(usual):  # utf16, utf-16le, u16
            name = usual
        encodings.append(name)
    return tuple(encodings) or UTF_8


def decode(content: bytes | bytearray, encodings: Sequence[str], offset: int = 0) -> str:
    """Decode a file's bytes, or those of a line that begins at `offset`, with the first encoding that can.

    A file that begins with a byte order mark has only that encoding, and one whose every other byte is zero is UTF-16
    of that byte order. Other zero bytes are of UTF-16 or UTF-32 if the list has one without a mark. A mark is no part
    of the text. Raises Undecodable if none can; it names the first fault in the first encoding.
    """
    head = content[:HEAD] if not offset else b""
    faults = []
    for encoding in encodings:
        fault = fault_in_head(head, encoding, encodings)
        if fault is not None:
            faults.append(fault)
            continue
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError as error:
            faults.append(error.start)
            continue
        if not offset:
            text = text.removeprefix("\ufeff")
        return text
    raise Undecodable(content, faults[0], encodings, offset)


def fault_in_head(head: bytes | bytearray, encoding: str, encodings: Sequence[str]) -> int | None:
    """Return the place of a fault if the beginning of a file shows that an encoding of the list is not its own: by a
    byte order mark, or by zero bytes; None otherwise.

    Args:
      head: the first `HEAD` bytes of a file; empty for a line further on.
    """
    if not head:
        return 0 if encoding in MARKED else None
    mark = byte_order_mark(head)
    unmarked = ""
    if not mark:
        unmarked = _unmarked_wide(head)
    wide = wide_encoding(head, encodings)
    if not mark and (encoding != unmarked if unmarked else wide and not is_wide(encoding)):
        return head.index(b"\0")
    marked = encoding if encoding in MARKED else ""
    if mark != marked and not (mark and encoding.startswith(mark)):
        return 0
    return None


def utf8_size(text: str, errors: str = "strict") -> int:
    """Return the bytes of a text as UTF-8, without a copy of it. Raises UnicodeEncodeError as `str.encode` does.

    Args:
      errors: handler of halves of surrogate pairs, as in `str.encode`.
    """
    if text.isascii():
        return len(text)
    size = 0
    for first in range(0, len(text), PART):
        part = text[first : first + PART]
        try:
            size += len(part.encode("utf-8", errors))
        except UnicodeEncodeError as error:
            start = first + error.start
            raise UnicodeEncodeError("utf-8", text, start, first + error.end, error.reason) from None
    return size


def byte_order_mark(content: bytes | bytearray) -> str:
    """Return utf-16 or utf-32 if the bytes begin with its byte order mark; empty otherwise."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return encoding
    return ""


def is_wide(encoding: str) -> bool:
    """Return True for UTF-16 and UTF-32, with or without a byte order."""
    return _WIDE.fullmatch(encoding) is not None


def wide_encoding(head: bytes | bytearray, encodings: Sequence[str]) -> str:
    """Return the encoding of the list, of those with more than a byte for each character, in which a file begins;
    empty if it begins in none."""
    for encoding in filter(is_wide, encodings):
        if byte_order_mark(head) == encoding or (encoding[-2:] in ("le", "be") and b"\0" in head):
            return encoding
    return ""


def is_binary(content: bytes, encodings: Sequence[str]) -> bool:
    """Return True for bytes that are no text: there is a zero byte in the first ones, or they begin as a PDF does.

    UTF-16 and UTF-32 have zero bytes too, and are text even if `encodings` lacks them.
    """
    head = content[:HEAD]
    if head.startswith(b"%PDF-"):
        return True
    if b"\0" not in head or byte_order_mark(head) or _unmarked_wide(head):
        return False
    return not any(_begins_in(head, encoding) for encoding in encodings if is_wide(encoding) and encoding not in MARKED)


def likely_encoding(content: bytes | bytearray, at: int, head: bytes | bytearray) -> str:
    """Return an encoding that decodes the bytes around a fault: by their mark, by the name in their first bytes, or by
    the statistics of languages. A text with few letters beyond ASCII is taken for cp1252.

    Args:
      head: the first bytes of the file, or of the line.
    """
    import charset_normalizer

    encoding = byte_order_mark(head) or _unmarked_wide(head)
    if encoding:
        return encoding
    start = max(at - SAMPLE, 0) // 4 * 4  # where a character of UTF-16 or UTF-32 begins
    sample = bytes(content[start : at + SAMPLE])
    for match in _DECLARED.finditer(head):
        declared = match[1].decode()
        if _decodes(sample, declared):
            return declared
    high = sum(byte > 127 for byte in sample)
    if high > max(ENOUGH, SHARE * len(sample)) or b"\0" in sample:
        guess = charset_normalizer.from_bytes(sample).best()
        if guess is not None and "cp1252" not in guess.could_be_from_charset:
            return guess.encoding.replace("_", "-")
    return "cp1252" if _decodes(sample, "cp1252") else "latin-1"


def _unmarked_wide(head: bytes | bytearray) -> str:
    """Return utf-16-le or utf-16-be if zero bytes are where Latin text has them, in one byte of most pairs, or if the
    bytes begin as JSON does, whatever its letters (RFC 4627, section 3); empty otherwise."""
    for encoding in ("utf-16-le", "utf-16-be"):
        begins_json = head.startswith(("{".encode(encoding), "[".encode(encoding)))
        if begins_json and head[2:4] != b"\0\0":
            return encoding
    first = head[::2].count(0)
    second = head[1::2].count(0)
    if len(head) < 8 or min(first, second) or 4 * max(first, second) <= len(head):
        return ""
    return "utf-16-be" if first else "utf-16-le"


def _begins_in(head: bytes, encoding: str) -> bool:
    """Return True if an encoding decodes the beginning of a file, which may end within a character."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return False
    return True
