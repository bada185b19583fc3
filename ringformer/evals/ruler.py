"""Six tasks of RULER (Hsieh et al. 2024) that need no outside data, in its prompts and by its metric.

What differs from the original: keys, values and variables are distinct, words are the package's own, none of them a
part of another, and a prompt is as long as fits and not cut to steps.
"""

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ringformer.evals.cases import Case, CountTokens, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.words import ADJECTIVES, NOUNS, distinct_pairs

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NIAH = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
    " The special magic {kind} for {key} mentioned in the provided text is"
)
TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assgined the value {value}, they are: "
)
"""With the original's spelling."""
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
HOPS = 4
COMMON_WORDS = 10
ZIPF = 2.0
"""The exponent of the frequencies of coded words."""


class Built(NamedTuple):
    prompt: str
    expected: tuple[str, ...]


class Task(NamedTuple):
    """A task of RULER."""

    build: Callable[[random.Random, int, int], Built]
    """The prompt of so many parts, for a context of so many tokens."""
    least: int
    """The fewest parts of which a prompt can be made."""
    max_new_tokens: int


def _niah(kind: str, keys: Callable, values: Callable, *, among_needles: bool) -> Callable:
    """A needle in a text of noise, or of other needles."""

    def build(rng: random.Random, parts: int, _length: int) -> Built:
        make_key, make_value = keys(rng), values(rng)
        key, value = next(make_key), next(make_value)
        others = (NEEDLE.format(kind=kind, key=next(make_key), value=next(make_value)) for _ in range(parts))
        sentences = list(others) if among_needles else [NOISE] * parts
        sentences.insert(rng.randrange(parts), NEEDLE.format(kind=kind, key=key, value=value))
        return Built(NIAH.format(kind=kind, key=key, context="\n".join(sentences)), (value,))

    return build


def _distinct(draw: Callable[[random.Random], str]) -> Callable[[random.Random], Iterator[str]]:
    """What `draw` draws, each once."""

    def stream(rng: random.Random) -> Iterator[str]:
        seen: set[str] = set()
        while True:
            if (drawn := draw(rng)) not in seen:
                seen.add(drawn)
                yield drawn

    return stream


def _letters(alphabet: str, count: int) -> Callable[[random.Random], Iterator[str]]:
    return _distinct(lambda rng: "".join(rng.choices(alphabet, k=count)))


_numbers = _distinct(lambda rng: str(rng.randrange(10**6, 10**7)))
_uuids = _distinct(lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def _chain(rng: random.Random, noises: int, letters: int) -> Built:
    """Variables assigned to one another, between lines of noise."""
    names = _letters(string.ascii_uppercase, letters)(rng)
    variables, value = [next(names) for _ in range(HOPS + 1)], rng.randrange(10_000, 100_000)
    chain = [f"VAR {variables[0]} = {value}"]
    chain += [f"VAR {variable} = VAR {before} " for before, variable in pairwise(variables)]
    sentences = [NOISE + "\n"] * noises
    for i, place in enumerate(sorted(rng.sample(range(noises), len(chain)))):
        sentences.insert(place + i, chain[i])
    return Built(TRACKING.format(context=" ".join(sentences), value=value, count=len(variables)), tuple(variables))


def _tracking(rng: random.Random, noises: int, _length: int) -> Built:
    """One chain behind an example of it."""
    example, asked = _chain(rng, HOPS + 1, 3), _chain(rng, noises, 5)
    return Built(f"{example.prompt} {' '.join(example.expected)}\n\n{asked.prompt}", asked.expected)


@cache
def single_words() -> tuple[str, ...]:
    """Words of which none is a part of another, so that finding one in an answer means that one."""
    words = [*ADJECTIVES, *(set(NOUNS) - set(ADJECTIVES))]
    return tuple(sorted(word for word in words if not any(word in other for other in words if other != word)))


@cache
def single_words_of_pairs() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns among `single_words`: no pair of them is a part of another, as able-arm is of
    stable-army."""
    singles = frozenset(single_words())
    adjectives, nouns = (tuple(word for word in words if word in singles) for words in (ADJECTIVES, NOUNS))
    return adjectives, nouns


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _list(words: list[str], repeats: tuple[int, int], rng: random.Random) -> Built:
    """A list of the first ten words, so many times each, and of the others, fewer times each."""
    repeated = words[:COMMON_WORDS] * repeats[0] + words[COMMON_WORDS:] * repeats[1]
    rng.shuffle(repeated)
    return Built(COMMON.format(context=_numbered(repeated)), tuple(words[:COMMON_WORDS]))


def _common(rng: random.Random, count: int, length: int) -> Built:
    """A list of `count` words behind an example; of pairs of words where there are not so many."""
    shown, example_repeats, repeats = (20, (3, 1), (6, 1)) if length < 4096 else (40, (10, 3), (30, 3))
    singles = single_words()
    example = _list(rng.sample(singles, shown), example_repeats, rng)
    if count <= len(singles):
        words = rng.sample(singles, count)
    else:
        pairs = distinct_pairs(rng, *single_words_of_pairs())
        words = [next(pairs) for _ in range(count)]
    asked = _list(words, repeats, rng)
    return Built(f"{example.prompt} {_numbered(list(example.expected))}\n{asked.prompt}", asked.expected)


def _frequent(rng: random.Random, count: int, length: int) -> Built:
    """About `count` coded words, drawn by rank to the power -2; the most frequent are dots."""
    coded = _letters(string.ascii_lowercase, 6)(rng)
    vocabulary = ["...", *(next(coded) for _ in range(max(length // 50, 8) - 1))]
    zeta = math.pi**2 / 6  # of ZIPF
    counts = (int(count * rank**-ZIPF / zeta) for rank in range(1, len(vocabulary) + 1))
    text = [word for word, often in zip(vocabulary, counts, strict=True) for _ in range(often)]
    rng.shuffle(text)
    return Built(FREQUENT.format(context=" ".join(text)), tuple(vocabulary[1:4]))


TASKS = {
    "niah_single_1": Task(_niah("number", distinct_pairs, _numbers, among_needles=False), 1, 128),
    "niah_multikey_2": Task(_niah("number", distinct_pairs, _numbers, among_needles=True), 1, 128),
    "niah_multikey_3": Task(_niah("uuid", _uuids, _uuids, among_needles=True), 1, 128),
    "vt": Task(_tracking, HOPS + 1, 30),
    "cwe": Task(_common, COMMON_WORDS + 1, 120),
    "fwe": Task(_frequent, 75, 50),  # from here on the fourth word stands more often than the fifth
}


def check(names: list[str]) -> list[str]:
    """The tasks of these names. Raises ValueError for one that is none of ours."""
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}; known: {', '.join(TASKS)}")
    return names


def cases_of_length(length: int, names: list[str], count: int, seed: int, tokens: CountTokens) -> Iterator[Case]:
    """`count` cases of each task, as long as leave room for the answer in `length` tokens. Raises ValueError for a task
    whose shortest prompt does not fit."""
    for name in names:
        build, least, new_tokens = TASKS[name]
        limit, guess = room_for_prompt(length, new_tokens), None
        for index in range(count):

            def built(parts: int, build=build, drawn=(name, seed, length, index)) -> Built:
                return build(seeded("ruler", *drawn), parts, length)

            def built_tokens(parts: int, built=built) -> int:
                return tokens(built(parts).prompt)

            try:
                guess = largest_that_fits(built_tokens, limit, least, guess)
            except ValueError as error:
                raise ValueError(f"{name} in {length:,} tokens: {error}, or name other --tasks") from None
            prompt, expected = built(guess)
            yield Case(length, index, prompt, expected, new_tokens, {"task": name})


def score(case: Case, answer: str) -> float:
    """The share of the references that stand in the answer, in any case of letters; RULER's metric is 100 times its
    mean."""
    return sum(reference.lower() in answer.lower() for reference in case.expected) / len(case.expected)
