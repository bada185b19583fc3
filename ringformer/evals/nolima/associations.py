"""Needles without a literal match, as in NoLiMa (Modarressi et al. 2025, arXiv:2502.05167, section 3).

A sentence says where a person lives, by a building or a monument; the question asks who has been in its city or
country. The two share no word, so that the needle is found by what is known of the world, not by its words. The
sentences and the pairs are ringformer's own. Pairs and names that occur in the text are not used.
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ringformer.evals.cases import Case, CountTokens, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.needle import Haystack, full_stops, place

NEEDLE = "\nActually, {name} lives beside {landmark}.\n"
QUESTION = "Which character has been in {region}?"
DIRECT = "Which character lives beside {landmark}?"
"""The question in the words of the needle: a control."""
INTRODUCTION = "Read this part of a book, and then answer a question about it.\n\n"
INSTRUCTION = (
    "Answer the question by what the part of the book says, or by what follows from it. Give only the name of the "
    "character.\n\nQuestion: "
)
ANSWER = "\nAnswer:"
MAX_NEW_TOKENS = 32
LEAST = 8
"""Fewest pairs and names that a text must leave."""


class Pair(NamedTuple):
    """A landmark, and where it is."""

    landmark: str
    region: str


PAIRS = (
    Pair("the Eiffel Tower", "Paris"),
    Pair("the Colosseum", "Rome"),
    Pair("the Acropolis", "Athens"),
    Pair("the Brandenburg Gate", "Berlin"),
    Pair("the Golden Gate Bridge", "San Francisco"),
    Pair("the Statue of Liberty", "New York"),
    Pair("Big Ben", "London"),
    Pair("the Sagrada Família", "Barcelona"),
    Pair("the Hagia Sophia", "Istanbul"),
    Pair("the Taj Mahal", "India"),
    Pair("the Great Sphinx", "Egypt"),
    Pair("Machu Picchu", "Peru"),
    Pair("the Forbidden City", "Beijing"),
    Pair("the Burj Khalifa", "Dubai"),
    Pair("the Little Mermaid statue", "Copenhagen"),
    Pair("the Charles Bridge", "Prague"),
    Pair("the Atomium", "Brussels"),
    Pair("the Prado", "Madrid"),
    Pair("the Rijksmuseum", "Amsterdam"),
    Pair("the Petronas Towers", "Kuala Lumpur"),
    Pair("the Space Needle", "Seattle"),
    Pair("the CN Tower", "Toronto"),
    Pair("Angkor Wat", "Cambodia"),
    Pair("the Schönbrunn Palace", "Vienna"),
    Pair("the Uffizi", "Florence"),
    Pair("the Rialto Bridge", "Venice"),
    Pair("the Kremlin", "Moscow"),
    Pair("the Blue Lagoon spa", "Iceland"),
    Pair("the Gateway Arch", "Missouri"),
    Pair("the Alamo", "Texas"),
)
NAMES = (
    *("Yuki", "Stuart", "Veronica", "Calvin", "Mandy", "Gary", "Katie", "Megan", "Tina", "Bruno", "Fatima", "Diego"),
    *("Ingrid", "Kenji", "Leila", "Marco", "Nadia", "Oscar", "Priya", "Sandra", "Tomas", "Vera", "Wanda", "Zoe"),
)


class Drawn(NamedTuple):
    """A needle and its question."""

    name: str
    pair: Pair


def usable(haystack: Haystack) -> tuple[list[Pair], list[str]]:
    """Return the pairs and the names that do not occur in the text. Raises ValueError if it leaves too few."""
    text = " ".join("".join(haystack.pieces).lower().split())
    pairs = []
    for pair in PAIRS:
        if not _within(text, pair.region) and not _within(text, pair.landmark.removeprefix("the ")):
            pairs.append(pair)
    names = [name for name in NAMES if not _within(text, name)]
    if min(len(pairs), len(names)) < LEAST:
        raise ValueError(
            f"--haystack={haystack.name} has the words of nearly all needles: {len(pairs)} of {len(PAIRS)} pairs and "
            f"{len(names)} of {len(NAMES)} names do not occur in it; name another text"
        )
    return pairs, names


def _within(text: str, words: str) -> bool:
    words = words.lower()
    return words in text and re.search(rf"\b{re.escape(words)}\b", text) is not None


def prompt(text: str, drawn: Drawn, depth: float, *, direct: bool) -> str:
    """Return a text with the needle at `depth` percent, and the question behind it."""
    position = place(full_stops(text), len(text), depth)
    needle = NEEDLE.format(name=drawn.name, landmark=drawn.pair.landmark)
    question = (DIRECT if direct else QUESTION).format_map(drawn.pair._asdict())
    return f"{INTRODUCTION}{text[:position]}{needle}{text[position:]}\n\n{INSTRUCTION}{question}{ANSWER}"


def cases_of_length(
    length: int,
    depths: Sequence[float],
    count: int,
    seed: int,
    haystack: Haystack,
    tokens: CountTokens,
    *,
    direct: bool,
) -> Iterator[Case]:
    """Yield `count` cases for each depth, in percent. The text is as long as possible while prompt and answer fit in
    `length` tokens; the label `repeats` says how often it begins again.

    The case of a depth has the same needle for `direct` and for the question without a literal match.
    """
    pairs, names = usable(haystack)
    limit = room_for_prompt(length, MAX_NEW_TOKENS)
    guess = None
    for depth, index in product(depths, range(count)):
        drawn = _draw(seeded("nolima", seed, length, depth, index), pairs, names)

        def prompt_of(words: int, drawn: Drawn = drawn, depth: float = depth) -> str:
            return prompt(haystack.text(words), drawn, depth, direct=direct)

        def prompt_tokens(words: int, prompt_of=prompt_of) -> int:
            return tokens(prompt_of(words))

        guess = largest_that_fits(prompt_tokens, limit, 1, guess)
        labels = {"depth": depth, "region": drawn.pair.region, "repeats": (guess - 1) // len(haystack.pieces)}
        yield Case(length, index, prompt_of(guess), (drawn.name,), MAX_NEW_TOKENS, labels)


def _draw(rng: random.Random, pairs: Sequence[Pair], names: Sequence[str]) -> Drawn:
    return Drawn(rng.choice(names), rng.choice(pairs))


def score(case: Case, answer: str) -> float:
    """Return 1 for an answer that has the name, else 0."""
    (name,) = case.expected
    return float(name in answer)
