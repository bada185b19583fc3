"""Needle in a haystack: sentences, each with a number, are hidden at some depth in a long text, and the model is asked
for some of the numbers."""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ringformer.evals.case_file import Row
from ringformer.evals.cases import Case, CountTokens, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.tables import cross_table
from ringformer.evals.texts import shipped
from ringformer.evals.texts.words import CITIES
from ringformer.files.hashes import content_hash

NEEDLE = "\nThe special magic {city} number is: {number}\n"
INTRODUCTION = "In the text below the special magic numbers of some cities are hidden. Remember them.\n\n"
ONE = "What is the special magic {city} number?"
MANY = "What are the special magic numbers of {cities}?"
ANSWER = "\nAnswer:"
MAX_NEW_TOKENS_A_NEEDLE = 32


class Haystack(NamedTuple):
    """A text to hide needles in, repeated as often as a context needs."""

    name: str
    """Name in outputs."""
    pieces: tuple[str, ...]
    """Words of the text, each with the white space that follows it."""

    @classmethod
    def load(cls, path: str | Path | None) -> "Haystack":
        """Load a UTF-8 text, or the one that ringformer ships. Raises ValueError if the text is not UTF-8, or has no
        full stop after which a needle could be placed."""
        name, text = shipped.read_text_of("--haystack", path)
        if not full_stops(text):
            raise ValueError(f"--haystack={path} has no full stop: name a text of sentences")
        if not text[-1:].isspace():
            text += "\n"
        return cls(name, tuple(re.findall(r"\S+\s*", text)))

    @property
    def settings(self) -> dict[str, str]:
        """Settings of an evaluation that hides needles in this text."""
        return {"haystack": self.name, "haystack_hash": content_hash("".join(self.pieces).encode())}

    def text(self, count: int) -> str:
        """Return `count` words of the endlessly repeated text."""
        whole, rest = divmod(count, len(self.pieces))
        return "".join(self.pieces) * whole + "".join(self.pieces[:rest])

    @property
    def numbers(self) -> set[int]:
        """Numbers of seven digits in the text."""
        return set(map(int, re.findall(r"\d{7}", "".join(self.pieces))))


class Needles(NamedTuple):
    """Number of needles hidden in a text, and number of those asked for."""

    hidden: int = 1
    asked: int = 1


def full_stops(text: str) -> list[int]:
    """Positions after each full stop that ends a word, where a needle may be inserted."""
    return [match.end() for match in re.finditer(r"\.(?=\s|$)", text)]


def place(stops: Sequence[int], length: int, depth: float) -> int:
    """Return the position of a needle at `depth` percent of a text of `length` characters: the last of `stops` up to
    that depth, or 0 if there is none."""
    return max((stop for stop in stops if stop <= length * depth / 100), default=0)


def prompt(text: str, needles: Sequence[tuple[str, int, float]], asked: Sequence[str]) -> str:
    """Build a prompt from a text, the needles to hide (city, number, depth in percent), and the cities asked for."""
    stops = full_stops(text)
    placed = []
    for i, (city, number, depth) in enumerate(needles):
        sentence = NEEDLE.format(city=city, number=number)
        placed.append((place(stops, len(text), depth), i, sentence))
    for position, _, sentence in sorted(placed, reverse=True):
        text = text[:position] + sentence + text[position:]
    *others, last = asked
    question = ONE.format(city=last)
    if others:
        question = MANY.format(cities=f"{', '.join(others)} and {last}")
    return f"{INTRODUCTION}{text}\n\n{question}{ANSWER}"


def check(needles: Needles, depths: Sequence[float]) -> None:
    """Raise ValueError for invalid numbers of needles, or for depths outside 0 to 100 percent."""
    if not 1 <= needles.asked <= needles.hidden <= len(CITIES):
        raise ValueError(
            f"{needles.asked} of {needles.hidden} needles: hide 1 to {len(CITIES)} and ask for as many or fewer"
        )
    for depth in depths:
        if not 0 <= depth <= 100:
            raise ValueError(f"--depths: {depth:g} is not a percentage from 0 to 100")


def cases_of_length(
    length: int,
    depths: Sequence[float],
    count: int,
    seed: int,
    needles: Needles,
    haystack: Haystack,
    tokens: CountTokens,
) -> Iterator[Case]:
    """Yield `count` cases for each depth. A depth, in percent, is that of the first needle asked for; other needles are
    placed at random.

    The text is as long as possible while prompt and answer fit in `length` tokens; the label `repeats` says how often
    it begins again.
    """
    new_tokens = MAX_NEW_TOKENS_A_NEEDLE * needles.asked
    limit = room_for_prompt(length, new_tokens)
    guess = None
    taken = haystack.numbers
    for depth, index in product(depths, range(count)):
        rng = seeded("needle", seed, length, depth, index)
        hidden = _draw(rng, needles.hidden, depth, taken)
        numbers = {city: str(number) for city, number, _ in hidden}
        asked = list(numbers)[: needles.asked]
        rng.shuffle(asked)

        def prompt_of(words: int, hidden=hidden, asked=asked) -> str:
            return prompt(haystack.text(words), hidden, asked)

        def prompt_tokens(words: int, prompt_of=prompt_of) -> int:
            return tokens(prompt_of(words))

        guess = largest_that_fits(prompt_tokens, limit, 1, guess)
        labels = {"depth": depth, "needles": needles.hidden, "asked": needles.asked}
        labels["repeats"] = (guess - 1) // len(haystack.pieces)
        expected = tuple(numbers[city] for city in asked)
        yield Case(length, index, prompt_of(guess), expected, new_tokens, labels)


def _draw(rng: random.Random, count: int, depth: float, taken: set[int]) -> list[tuple[str, int, float]]:
    """Draw needles with distinct cities and distinct seven-digit numbers that are not `taken`."""
    needles: list[tuple[str, int, float]] = []
    for city in rng.sample(CITIES, count):
        while (number := rng.randrange(10**6, 10**7)) in taken:
            pass
        taken = taken | {number}
        if needles:
            depth = 100 * rng.random()
        needles.append((city, number, depth))
    return needles


def score(case: Case, answer: str) -> float:
    """Share of the expected numbers that occur in the answer."""
    return sum(number in answer for number in case.expected) / len(case.expected)


def table(rows: Sequence[Row]) -> str:
    """Tabulate the mean scores by depth and context, and name the contexts for which the text is repeated."""
    repeated = sorted({row["length"] for row in rows if row["repeats"]})
    text = cross_table(rows, "depth", "{:g}%")
    if repeated:
        text += f"\nthe text is repeated in contexts of {', '.join(map('{:,}'.format, repeated))} tokens"
    return text
