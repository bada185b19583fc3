"""Values of JSON, parsed only after their size is known to be within the limit of a record."""

import json
import re
from typing import Any, TextIO

from ringformer.data.sources.row_sizes import record_bytes
from ringformer.data.sources.text_files import check_record, too_large

AHEAD = 2**16
"""Fewest characters to read at a time."""
MANY_CHARACTERS = 2**20
"""Characters of a value from which on its values are counted before it is parsed."""
CHARACTERS_OF_VALUE = 128
FEW_VALUES = 2**18
"""A record has at most one value for so many bytes of its limit, besides a few: Python's objects are many times larger
than small values of JSON, such as `[]`."""
LONGEST_SIGN = 16
"""More characters than any number's exponent, escape or name of JSON, such as -Infinity, has."""
_OUTSIDE_STRINGS = re.compile(r'([^"]*+)("(?:[^"\\]++|\\.)*+"?)?', re.DOTALL)
"""JSON up to the next string, and that string."""
_SPACE = re.compile(r"\s*")


def parse_record(text: str, name: str, max_bytes: int | None) -> Any:
    """Parse a value of JSON.

    Raises ValueError and RecursionError as `json.loads` does, and TooLarge, which names the value `name`, if it has
    more values than a record of `max_bytes` bytes may have; None: no limit.
    """
    _check_values(text, 0, name, max_bytes)
    return json.loads(text)


class JsonText:
    """Text of a file, of which only the value that is being parsed is in memory."""

    def __init__(self, file: TextIO):
        self._file = file
        self._text = ""
        self._has_ended = False
        self.place: int = 0
        """Place in the text that is in memory."""
        self.line: int = 1
        """Number of the line, from 1."""

    def next_sign(self) -> str:
        """Pass white space, and return the sign behind it; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self.place)
            if space is not None:
                self._pass_to(space.end())
            if self.place < len(self._text) or self._has_ended:
                return self._text[self.place : self.place + 1]
            self._read(AHEAD)

    def pass_sign(self) -> None:
        """Go on behind a sign."""
        self._pass_to(self.place + 1)

    def value(self, name: str, max_bytes: int | None) -> Any:
        """Parse the value that begins here, and go on behind it.

        Raises ValueError and RecursionError as `json.loads` does, and TooLarge, which names the value `name`, for a
        value that is larger than a record of `max_bytes` bytes may be.
        """
        most = record_bytes(max_bytes)
        decoder = json.JSONDecoder()
        while True:
            ahead = len(self._text) - self.place
            if ahead > MANY_CHARACTERS:
                check_record(name, ahead, max_bytes)
                _check_values(self._text, self.place, name, max_bytes)
            try:
                value, end = decoder.raw_decode(self._text, self.place)
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - LONGEST_SIGN
                if self._has_ended or not is_open:
                    characters = error.pos - self.place
                    raise ValueError(f"{error.msg}, {characters:,} characters behind its beginning") from None
            else:
                if end < len(self._text) or self._has_ended:
                    self._pass_to(end)
                    return value
            self._read(min(max(ahead // 2, AHEAD), most + 1 - ahead))

    def _pass_to(self, place: int) -> None:
        self.line += self._text.count("\n", self.place, place)
        self.place = place

    def _read(self, count: int) -> None:
        """Read characters on, and forget those that were passed."""
        rest = self._text[self.place :]
        self._text = ""
        self.place = 0
        more = self._file.read(count)
        self._has_ended = not more
        self._text = rest + more


def _check_values(text: str, start: int, name: str, max_bytes: int | None) -> None:
    """Raise TooLarge if JSON from a place on has more values than a record of `max_bytes` bytes may have."""
    if max_bytes is None or len(text) - start <= MANY_CHARACTERS:
        return
    most = record_bytes(max_bytes) // CHARACTERS_OF_VALUE + FEW_VALUES
    values = 0
    for outside in _OUTSIDE_STRINGS.finditer(text, start):
        first, end = outside.span(1)
        values += sum(text.count(sign, first, end) for sign in ",[{")
        if values > most:
            raise too_large(name, max_bytes, f"bytes would allow: it may have {most:,} values, and has more")
