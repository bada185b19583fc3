"""Line retrieval as LongEval has it: a record of numbered lines, and the number of one of them is asked for."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.evals.cases import Case, CountTokens, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.words import distinct_pairs

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
LINE = "line {index}: REGISTER_CONTENT is <{number}>\n"
FOOTER = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {index}? I need the number. "
MAX_NEW_TOKENS = 100
MOST_DIGITS = 1000
"""Of an answer that is taken for a number: Python reads no longer ones."""

LARGEST = 50_000
"""The largest number of the official form."""


class Numbers(NamedTuple):
    """The numbers of the lines, both ends included; another range than 1 to 50,000 is another task."""

    smallest: int = 1
    largest: int = LARGEST

    @property
    def form(self) -> str:
        """What the outputs call it."""
        official = self == Numbers()
        return "LongEval's" if official else f"numbers {self.smallest} to {self.largest}, not LongEval's"


def record_text(lines: Iterable[tuple[str, int]]) -> str:
    """A record of lines, (index, number) each, up to where the question begins."""
    return HEADER + "".join(LINE.format(index=index, number=number) for index, number in lines)


class Record:
    """Lines of a case; the first n are the same however many are asked for.

    Args:
      parts: what the random numbers are a function of.
    """

    def __init__(self, numbers: Numbers, *parts: object):
        if not 0 <= numbers.smallest <= numbers.largest:
            raise ValueError(f"numbers from {numbers.smallest} to {numbers.largest}: name 0 or more, and a range")
        self._numbers = numbers
        self._random, self._asked = seeded("lines", *parts), seeded("asked line", *parts).random()
        self._indices = distinct_pairs(self._random)
        self._lines: list[tuple[str, int]] = []

    def lines(self, count: int) -> list[tuple[str, int]]:
        """The index and the number of each of `count` lines, indices distinct."""
        while len(self._lines) < count:
            index = next(self._indices)
            self._lines.append((index, self._random.randint(*self._numbers)))
        return self._lines[:count]

    def prompt(self, count: int) -> str:
        """The prompt of `count` lines, which ends in a space."""
        lines = self.lines(count)
        return record_text(lines) + FOOTER.format(index=lines[self.position(count)][0])

    def position(self, count: int) -> int:
        """Which of `count` lines is asked for, from 0."""
        return int(self._asked * count)

    def case(self, length: int | None, index: int, count: int) -> Case:
        position = self.position(count)
        number = self.lines(count)[position][1]
        labels = {"num_lines": count, "position": position}
        return Case(length, index, self.prompt(count), (str(number),), MAX_NEW_TOKENS, labels)


def cases_of_length(length: int, count: int, seed: int, numbers: Numbers, tokens: CountTokens) -> Iterator[Case]:
    """`count` cases whose prompts have as many lines as leave room for the answer in `length` tokens."""
    limit, guess = room_for_prompt(length, MAX_NEW_TOKENS), None
    for index in range(count):
        record = Record(numbers, seed, length, index)

        def prompt_tokens(lines: int, record: Record = record) -> int:
            return tokens(record.prompt(lines))

        guess = largest_that_fits(prompt_tokens, limit, 1, guess)
        yield record.case(length, index, guess)


def cases_of_lines(num_lines: int, count: int, seed: int, numbers: Numbers) -> Iterator[Case]:
    """`count` cases of so many lines, however many tokens they have."""
    if num_lines < 1:
        raise ValueError(f"--num_lines={num_lines} must be at least 1")
    for index in range(count):
        yield Record(numbers, seed, "lines", num_lines, index).case(None, index, num_lines)


def read_official(path: str | Path) -> list[Case]:
    """The cases of a file of LongEval: a JSON object a line, its prompt verbatim.

    Raises ValueError for what is no text, and naming the line that is no row, or that lacks a key.
    """
    cases: list[Case] = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as rows of LongEval: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            prompt, expected, lines = row["prompt"], row["expected_number"], row["num_lines"]
            position = row["random_idx"][1]
            if not (isinstance(prompt, str) and prompt and type(expected) is type(lines) is type(position) is int):
                raise TypeError
        except (ValueError, TypeError, KeyError, IndexError):
            raise ValueError(
                f"{path}:{number} is no row of LongEval: a JSON object with prompt, expected_number, num_lines and "
                "random_idx"
            ) from None
        labels = {"num_lines": lines, "position": position}
        cases.append(Case(None, len(cases), prompt, (str(expected),), MAX_NEW_TOKENS, labels))
    if not cases:
        raise ValueError(f"{path} has no rows")
    return cases


def score(case: Case, answer: str) -> float:
    """1 if the last number of the answer is the expected one, as an integer, else 0; no number is wrong."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and len(numbers[-1]) < MOST_DIGITS and int(numbers[-1]) == int(case.expected[0]))
