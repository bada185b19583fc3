"""The thirteen tasks of RULER (Hsieh et al. 2024): the random content of their prompts, the prompts' length, and the
metric.

The prompts differ from those of NVIDIA/RULER's generator in four ways. Keys, values, variables and coded words are
distinct. Every case orders its list anew. A needle in essays may follow any full stop, including that of an
abbreviation. The words are the package's own, unless the original's are given. If a list needs more words than there
are, it consists of pairs of words.
"""

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

from ringformer.evals.cases import Case, CountTokens, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.ruler import prompts
from ringformer.evals.ruler.data import Data, sentences
from ringformer.evals.ruler.prompts import Prompt
from ringformer.evals.texts.words import distinct_pairs

HOPS = 4
COMMON_WORDS = 10
LONG = 4096
"""Shortest context, in tokens, in which lists repeat each word more often and prompts shrink in larger steps."""
EXAMPLE_TOKENS = 500
EXAMPLE_NOISES = 5
"""Most tokens of the example of `vt`, and fewest sentences of noise in it."""
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Depths of needles in essays, as percentages of the sentences."""
ZIPF = 2.0
"""Exponent of the frequencies of coded words."""


class Built(NamedTuple):
    """A prompt and the references of its answer."""

    prompt: Prompt
    expected: Sequence[str]


class Setting(NamedTuple):
    """Inputs that the cases of a task at one length share."""

    length: int
    room: int
    """Most tokens of a prompt."""
    tokens: CountTokens
    data: Data
    rng: random.Random
    """Generator of the random numbers that are drawn once for all cases."""

    def step(self, long: int, short: int = 5) -> int:
        """Return `long` for a context of at least `LONG` tokens, otherwise `short`."""
        return long if self.length >= LONG else short


class Plan(NamedTuple):
    """Recipe that builds the cases of a task at one length."""

    build: Callable[[random.Random, int, int], Built]
    """Function that builds a case from its random numbers, its number and a number of parts: sentences, words or
    documents."""
    least: int
    """Fewest parts that make a prompt."""
    step: int
    """Parts to remove at a time from a case whose random content makes it too long."""
    unit: int = 1
    """Parts to add at a time in the search for the largest number that fits."""


class Task(NamedTuple):
    """A task of RULER."""

    plan: Callable[[Setting], Plan]
    max_new_tokens: int
    needs: str | None = None
    """Flag of the external data that the task needs."""


def _distinct(draw: Callable[[], object]) -> Iterator[str]:
    """Yield distinct values of `draw`, as text."""
    seen: set[str] = set()
    while True:
        if (drawn := str(draw())) not in seen:
            seen.add(drawn)
            yield drawn


def _letters(rng: random.Random, alphabet: str, count: int) -> Iterator[str]:
    return _distinct(lambda: "".join(rng.choices(alphabet, k=count)))


def _values(rng: random.Random, kind: str) -> Iterator[str]:
    if kind == "uuid":
        return _distinct(lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
    return _distinct(lambda: rng.randrange(10**6, 10**7))


def _niah(
    haystack: str, kind: str = "number", *, key: str = "word", keys: int = 1, values: int = 1, asked: int = 1
) -> Callable[[Setting], Plan]:
    """Plan needles in a haystack of noise, other needles or essays. There are `keys` keys with `values` values each;
    `asked` of the keys are asked for.

    Args:
      kind: kind of the values, number or uuid.
      key: word or uuid.
    """

    def plan(setting: Setting) -> Plan:
        def build(rng: random.Random, _index: int, parts: int) -> Built:
            draw_key = _values(rng, key) if key == "uuid" else distinct_pairs(rng, *setting.data.words.keys)
            draw_value = _values(rng, kind)
            needles: dict[str, list[str]] = {}
            hidden: list[str] = []
            for name in islice(draw_key, keys):
                needles[name] = list(islice(draw_value, values))
                for value in needles[name]:
                    hidden.append(prompts.needle(kind, name, value))
            rng.shuffle(hidden)
            if haystack == "essays":
                text = " ".join(islice(cycle(setting.data.essays), parts))
                context = prompts.among_sentences(sentences(text), hidden, rng.sample(DEPTHS, len(hidden)))
            else:
                lines = [prompts.NOISE] * parts
                if haystack == "needles":
                    lines = [prompts.needle(kind, next(draw_key), next(draw_value)) for _ in range(parts)]
                context = prompts.among_lines(lines, hidden, rng.sample(range(parts), len(hidden)))
            names = rng.sample(list(needles), asked)
            answers: list[str] = []
            for name in names:
                answers += needles[name]
            return Built(prompts.asking(kind, context, names, len(answers)), answers)

        step = 500 if haystack == "essays" else setting.step(25)
        return Plan(build, step, step)

    return plan


def _tracking(setting: Setting) -> Plan:
    """Plan variables that are assigned to one another between lines of noise. An example precedes them; its assignments
    are at the same places in every case."""

    def chain(rng: random.Random, letters: int, value: int, noises: int, places: Sequence[int]) -> Built:
        names = list(islice(_letters(rng, string.ascii_uppercase, letters), HOPS + 1))
        return Built(prompts.chain(names, value, noises, places), names)

    def example_tokens(noises: int) -> int:
        return setting.tokens(*chain(random.Random(0), 3, 12345, noises, range(HOPS + 1)).prompt)

    example_noises = EXAMPLE_NOISES
    if example_tokens(EXAMPLE_NOISES) <= EXAMPLE_TOKENS:
        example_noises = largest_that_fits(example_tokens, EXAMPLE_TOKENS, EXAMPLE_NOISES)
    example_places = sorted(setting.rng.sample(range(example_noises), HOPS + 1))

    def build(rng: random.Random, _index: int, noises: int) -> Built:
        example = chain(rng, 3, rng.randrange(10_000, 99_999), example_noises, example_places)
        places = sorted(rng.sample(range(noises), HOPS + 1))
        asked = chain(rng, 5, rng.randrange(10_000, 99_999), noises, places)
        return Built(prompts.chain_behind_example(example.prompt, example.expected, asked.prompt), asked.expected)

    step = setting.step(10)
    return Plan(build, step, step)


def _common(setting: Setting) -> Plan:
    """Plan a list of words after an example list; ten words are more frequent than the others."""
    shown = 20
    example_repeats = 3, 1
    repeats = 6, 1
    if setting.length >= LONG:
        shown = 40
        example_repeats = 10, 3
        repeats = 30, 3
    words = setting.data.words

    def repeated(rng: random.Random, chosen: Sequence[str], times: tuple[int, int]) -> list[str]:
        listed = [*chosen[:COMMON_WORDS]] * times[0] + [*chosen[COMMON_WORDS:]] * times[1]
        rng.shuffle(listed)
        return listed

    def build(rng: random.Random, _index: int, count: int) -> Built:
        example = rng.sample(words.listed, shown)
        if count <= len(words.listed):
            chosen = rng.sample(words.listed, count)
        else:
            chosen = list(islice(distinct_pairs(rng, *words.pairs), count))
        lists = repeated(rng, example, example_repeats), repeated(rng, chosen, repeats)
        prompt = prompts.list_behind_example(lists[0], example[:COMMON_WORDS], lists[1])
        return Built(prompt, chosen[:COMMON_WORDS])

    return Plan(build, COMMON_WORDS + 1, 10)


def _frequent(setting: Setting) -> Plan:
    """Plan a text of coded words with frequencies by Zipf's law; the most frequent word consists of dots."""
    zeta = math.pi**2 / 6  # zeta(ZIPF)
    step = max(1, setting.room // 32)

    def build(rng: random.Random, _index: int, count: int) -> Built:
        coded = islice(_letters(rng, string.ascii_lowercase, 6), max(setting.room // 50, 5) - 1)
        vocabulary = ["...", *coded]
        text: list[str] = []
        for rank, word in enumerate(vocabulary, 1):
            text += [word] * int(count * rank**-ZIPF / zeta)
        rng.shuffle(text)
        return Built(prompts.coded_text(text), vocabulary[1:4])

    first = setting.room // 6
    fewest = 75  # from 75 on, the fourth word is more frequent than the fifth
    return Plan(build, fewest + (first - fewest) % step, step, unit=step)


def _answering(name: str, setting: Setting) -> Plan:
    """Plan a question about documents that are mixed with other documents; the number of the case is the number of the
    question.

    Args:
      name: squad or hotpotqa.
    """
    questions, texts = getattr(setting.data, name)

    def build(rng: random.Random, index: int, count: int) -> Built:
        if index >= len(questions):
            raise ValueError(f"there are {len(questions):,} questions: ask for as many --num_cases or fewer")
        question, answers, own, related = questions[index]
        if count >= len(texts):
            shown = list(islice(cycle(texts), count))
        elif count > len(own) + len(related):
            first = {*own, *related}
            others = [text for text in texts if text not in first]
            shown = [*own, *related, *rng.sample(others, count - len(own) - len(related))]
        else:
            shown = [*own, *rng.sample(related, max(0, count - len(own)))]
        rng.shuffle(shown)
        return Built(prompts.documents(shown, question), answers)

    return Plan(build, 10, 10)


TASKS = {
    "niah_single_1": Task(_niah("noise"), 128),
    "niah_single_2": Task(_niah("essays"), 128, "essays"),
    "niah_single_3": Task(_niah("essays", "uuid"), 128, "essays"),
    "niah_multikey_1": Task(_niah("essays", keys=4), 128, "essays"),
    "niah_multikey_2": Task(_niah("needles"), 128),
    "niah_multikey_3": Task(_niah("needles", "uuid", key="uuid"), 128),
    "niah_multivalue": Task(_niah("essays", values=4), 128, "essays"),
    "niah_multiquery": Task(_niah("essays", keys=4, asked=4), 128, "essays"),
    "vt": Task(_tracking, 30),
    "cwe": Task(_common, 120),
    "fwe": Task(_frequent, 50),
    "qa_1": Task(partial(_answering, "squad"), 32, "squad"),
    "qa_2": Task(partial(_answering, "hotpotqa"), 32, "hotpotqa"),
}
ANY_REFERENCE = ("qa_1", "qa_2")
"""Tasks for which one reference in the answer is enough."""


def choose(names: Sequence[str] | None, data: Data) -> list[str]:
    """Return the tasks to run; None: all tasks whose data are given. Raises ValueError for an unknown task, or for a
    task that needs a file that was not given."""
    if names is None:
        return [name for name, task in TASKS.items() if task.needs is None or data.settings[task.needs]]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
        if (needs := TASKS[name].needs) and not data.settings[needs]:
            raise ValueError(f"{name} needs data that ringformer does not contain: set --{needs}=FILE")
    return list(names)


def cases_of_length(length: int, name: str, count: int, seed: int, tokens: CountTokens, data: Data) -> Iterator[Case]:
    """Yield `count` cases of a task whose prompt and answer have at most `length` tokens. The number of parts is the
    largest that fits for one sample that all cases share; it is reduced in steps for cases that turn out longer. Raises
    ValueError for a task whose shortest prompt does not fit."""
    task = TASKS[name]
    room = room_for_prompt(length, task.max_new_tokens)
    build, least, step, unit = task.plan(Setting(length, room, tokens, data, seeded("ruler", name, seed, length)))

    def built(drawn: object, index: int, parts: int) -> tuple[Built, int]:
        case = build(seeded("ruler", name, seed, length, drawn), index, parts)
        return case, tokens(*case.prompt)

    too_short = f"{name} in {length:,} tokens: "
    try:
        units = largest_that_fits(lambda units: built("size", 0, least + units * unit)[1], room, 0)
    except ValueError as error:
        raise ValueError(f"{too_short}{error}, or choose other --tasks") from None
    for index in range(count):
        parts = least + units * unit
        while (case := built(index, index, parts))[1] > room:
            if parts == least:
                shortest = f"the shortest prompt of case {index} does not fit"
                raise ValueError(f"{too_short}{shortest}: ask for a longer context, or choose other --tasks")
            parts = max(least, parts - step)
        (question, prefix), expected = case[0]
        yield Case(length, index, question, tuple(expected), task.max_new_tokens, {"task": name}, prefix)


def score(case: Case, answer: str) -> float:
    """Return the share of the references that occur in the answer, ignoring case; for a task of `ANY_REFERENCE`, 1 if
    any occurs. RULER's metric is 100 times the mean of these shares."""
    hits = [reference.lower() in answer.lower() for reference in case.expected]
    if case.labels["task"] in ANY_REFERENCE:
        return float(any(hits))
    return sum(hits) / len(hits)
