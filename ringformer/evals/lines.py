"""LongEval's line retrieval: a record of lines, each with a number, and a question for the number of one line."""

import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ringformer.evals.cases import Case, CountTokens, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.texts.words import distinct_pairs
from ringformer.files.json_text import parse_json
from ringformer.files.untrusted import check_readable

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
LINE = "line {index}: REGISTER_CONTENT is <{number}>\n"
FOOTER = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {index}? I need the number. "
MAX_NEW_TOKENS = 100
MOST_LINES = 1_000_000
"""Most lines of a document."""
MOST_DIGITS = 1000
"""Number of digits from which a number counts as a wrong answer; Python refuses to parse much longer integers."""

CASES = 50
"""LongEval's number of cases."""
LARGEST = 50_000
"""The largest number of the official form."""


class Numbers(NamedTuple):
    """Range of the numbers in lines, both ends included. LongEval's task is the range from 1 to 50,000."""

    smallest: int = 1
    largest: int = LARGEST

    @property
    def form(self) -> str:
        """Name of the range in outputs."""
        if self == Numbers():
            return "LongEval's"
        return f"numbers {self.smallest} to {self.largest}, not LongEval's"


def record_text(lines: Iterable[tuple[str, int]]) -> str:
    """Format the record in a prompt, given its lines as (index, number): all text before the question."""
    return HEADER + "".join(LINE.format(index=index, number=number) for index, number in lines)


def _draw(rng: random.Random, numbers: Numbers) -> Iterator[tuple[str, int]]:
    for index in distinct_pairs(rng):
        yield index, rng.randint(*numbers)


class Record:
    """Lines of a document and the questions about them. The first n lines are the same, however many are requested.

    Args:
      parts: seed of the random numbers.
      questions: number of questions, each about another line.
    """

    def __init__(self, numbers: Numbers, *parts: object, questions: int = 1):
        if not 0 <= numbers.smallest <= numbers.largest:
            raise ValueError(f"numbers from {numbers.smallest} to {numbers.largest}: use 0 <= smallest <= largest")
        rng = seeded("lines", *parts)
        self._asked = seeded("asked line", *parts).random()
        self._drawn = _draw(rng, numbers)
        self._lines: list[tuple[str, int]] = []
        self._parts = parts
        self._questions = questions

    def lines(self, count: int) -> list[tuple[str, int]]:
        """Return the first `count` lines as (index, number), with distinct indices."""
        self._lines += islice(self._drawn, max(0, count - len(self._lines)))
        return self._lines[:count]

    def prompt(self, count: int, position: int | None = None) -> str:
        """Format the prompt of `count` lines, which ends in a space and asks for the line at `position`; None: the
        first question."""
        lines = self.lines(count)
        if position is None:
            position = self._positions(count)[0]
        return record_text(lines) + FOOTER.format(index=lines[position][0])

    def longest_prompt(self, count: int, tokens: CountTokens) -> str:
        """Format the prompt of `count` lines whose question has the most tokens."""
        lines = self.lines(count)
        longest = max(self._positions(count), key=lambda i: tokens(FOOTER.format(index=lines[i][0])))
        return self.prompt(count, longest)

    def _positions(self, count: int) -> list[int]:
        """Return the positions of the lines asked for: distinct ones, as many as there are questions or lines."""
        first = int(self._asked * count)
        if self._questions == 1:
            return [first]
        others = [i for i in range(count) if i != first]
        return [first, *seeded("asked lines", *self._parts).sample(others, min(self._questions - 1, len(others)))]

    def cases(self, length: int | None, index: int, count: int) -> Iterator[Case]:
        """Yield the cases of `count` lines, one for each question, with the position of the line asked for, from 0,
        among their labels. Raises ValueError if there are more questions than lines."""
        if self._questions > count:
            raise ValueError(f"--questions={self._questions}: a document has only {count} lines to ask for")
        for question, position in enumerate(self._positions(count)):
            labels = {"num_lines": count, "position": position}
            if self._questions > 1:
                labels["question"] = question
            number = str(self.lines(count)[position][1])
            yield Case(length, index, self.prompt(count, position), (number,), MAX_NEW_TOKENS, labels)


def cases_of_length(
    length: int, count: int, seed: int, numbers: Numbers, tokens: CountTokens, questions: int = 1
) -> Iterator[Case]:
    """Yield the questions about `count` documents with as many lines as leave room for every question and its answer in
    `length` tokens."""
    limit = room_for_prompt(length, MAX_NEW_TOKENS)
    guess = None
    for index in range(count):
        record = Record(numbers, seed, length, index, questions=questions)

        def prompt_tokens(lines: int, record: Record = record) -> int:
            return tokens(record.longest_prompt(lines, tokens))

        guess = largest_that_fits(prompt_tokens, limit, 1, guess)
        yield from record.cases(length, index, guess)


def cases_of_lines(num_lines: int, count: int, seed: int, numbers: Numbers, questions: int = 1) -> Iterator[Case]:
    """Yield the questions about `count` documents of `num_lines` lines, regardless of their tokens."""
    if not 1 <= num_lines <= MOST_LINES:
        raise ValueError(f"--num_lines={num_lines} must be at least 1, and at most {MOST_LINES:,}")
    for index in range(count):
        yield from Record(numbers, seed, "lines", num_lines, index, questions=questions).cases(None, index, num_lines)


def read_official(path: str | Path) -> list[Case]:
    """Read the cases of one of LongEval's files, one JSON object per line, with their prompts verbatim.

    Raises ValueError for an unreadable file, and for a line that is not a row or lacks a key; the message has the
    line's number.
    """
    cases: list[Case] = []
    try:
        check_readable(path)
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as rows of LongEval: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            fields = row["prompt"], row["expected_number"], row["num_lines"], row["random_idx"][1]
            if tuple(map(type, fields)) != (str, int, int, int) or not row["prompt"]:
                raise TypeError
        except (ValueError, TypeError, LookupError):
            raise ValueError(
                f"{path}:{number} is not a row of LongEval, a JSON object with prompt, expected_number, num_lines and "
                "random_idx"
            ) from None
        prompt, expected, count, position = fields
        labels = {"num_lines": count, "position": position}
        cases.append(Case(None, len(cases), prompt, (str(expected),), MAX_NEW_TOKENS, labels))
    if not cases:
        raise ValueError(f"{path} has no rows")
    return cases


def score(case: Case, answer: str) -> float:
    """Score 1 if the last number of the answer equals the expected integer, else 0."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and len(numbers[-1]) < MOST_DIGITS and int(numbers[-1]) == int(case.expected[0]))
