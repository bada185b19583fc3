"""The cases of MRCR, multi-round co-reference resolution (Vodrahalli et al. 2024, Michelangelo, section 4.2; OpenAI's
open form of 2025, openai/mrcr).

In a long conversation, a user asks for many short texts. One request is made several times, and each time the answer is
another. The last message asks for one of these answers by its number, behind a random prefix. The conversations are the
package's own: the answers are passages of a text in the public domain, in the order of the text, whatever was asked
for, so that only the place in the conversation tells them apart.
"""

import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from ringformer.data.chats.conversations import Message
from ringformer.evals.case_file import Row
from ringformer.evals.cases import Case, PromptText, largest_that_fits, room_for_prompt, seeded
from ringformer.evals.tables import grouped, mean, mean_tokens, score_interval, span
from ringformer.evals.texts.words import NOUNS

KINDS = ("poem", "story", "letter", "speech", "song", "report", "riddle", "essay", "play", "diary entry")
REQUEST = "Write a {kind} about the {noun}."
QUESTION = (
    "Prepend {prefix} to the {number} (1 indexed) {kind} about the {noun}. "
    "Do not include any other text in your response."
)
PREFIX_LENGTH = 10
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
PASSAGE_WORDS = range(40, 121)
"""Numbers of words that a passage may have."""
SPARE_TOKENS = 16
"""Tokens that an answer may have beyond the expected ones."""

CountTokens = Callable[[PromptText], int]


class Request(NamedTuple):
    """Request of a user: a kind of text and its subject."""

    kind: str
    noun: str

    def __str__(self) -> str:
        return REQUEST.format(kind=self.kind, noun=self.noun)


class Exchange(NamedTuple):
    """A request and its answer."""

    request: Request
    answer: str


def passages_of(text: str) -> list[str]:
    """Return the paragraphs of a text that have `PASSAGE_WORDS`, each on one line, without repetitions. Raises
    ValueError if there are fewer than eight."""
    passages: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if len(words) in PASSAGE_WORDS:
            passages[" ".join(words)] = None
    if len(passages) < len(ORDINALS):
        raise ValueError(
            f"the text has {len(passages)} paragraphs of {PASSAGE_WORDS.start} to {PASSAGE_WORDS.stop - 1} words, too "
            "few for a conversation: name another one"
        )
    return list(passages)


def check(needles: int) -> None:
    """Raise ValueError for a number of equal requests that has no ordinal, or of which none could be confused."""
    if not 2 <= needles <= len(ORDINALS):
        raise ValueError(f"--needles={needles}: the same request is made 2 to {len(ORDINALS)} times")


def cases_of_length(
    length: int,
    count: int,
    seed: int,
    needles: int,
    passages: Sequence[str],
    tokens: CountTokens,
    *,
    chat: bool,
) -> Iterator[Case]:
    """Yield `count` cases whose conversations are as long as possible while prompt and answer fit in `length` tokens.

    Args:
      needles: times that the same request is made.
      chat: True for prompts that are messages, for a chat template; False for one text to continue.

    Raises ValueError if not even the equal requests fit.
    """
    guess = None
    longest = max(passages, key=len)
    for index in range(count):
        draw = _Drawn(passages, needles, "mrcr", seed, length, needles, index)
        new_tokens = tokens(draw.prefix + longest) + SPARE_TOKENS
        limit = room_for_prompt(length, new_tokens)

        def prompt_tokens(exchanges: int, draw: "_Drawn" = draw) -> int:
            return tokens(draw.prompt(exchanges, chat=chat))

        guess = largest_that_fits(prompt_tokens, limit, needles, guess)
        labels = {"needles": needles, "asked": draw.asked + 1, "exchanges": guess}
        yield Case(length, index, draw.prompt(guess, chat=chat), (draw.expected(guess),), new_tokens, labels)


class _Drawn:
    """Random numbers of a case, and its conversation with so many exchanges.

    Args:
      seeds: parts of the seed.
    """

    def __init__(self, passages: Sequence[str], needles: int, *seeds: object):
        rng = seeded(*seeds)
        self._passages = passages
        self._needles = needles
        self._seeds = seeds
        self._first = rng.randrange(len(passages))
        self._wanted = Request(rng.choice(KINDS), rng.choice(NOUNS))
        self.asked = rng.randrange(needles)
        self.prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=PREFIX_LENGTH))

    def passage(self, number: int) -> str:
        """Return the answer of an exchange."""
        return self._passages[(self._first + number) % len(self._passages)]

    def places(self, exchanges: int) -> list[int]:
        """Return the exchanges that make the same request, ascending. No two have the same answer."""
        rng = seeded("places", exchanges, *self._seeds)
        while True:
            places = sorted(rng.sample(range(exchanges), self._needles))
            if len({place % len(self._passages) for place in places}) == self._needles:
                return places

    def conversation(self, exchanges: int) -> list[Exchange]:
        """Return the exchanges before the question."""
        places = set(self.places(exchanges))
        others = self._others(seeded("others", *self._seeds))
        conversation = []
        for number in range(exchanges):
            request = self._wanted if number in places else next(others)
            conversation.append(Exchange(request, self.passage(number)))
        return conversation

    def _others(self, rng: random.Random) -> Iterator[Request]:
        """Yield requests that differ from the one that is repeated."""
        while True:
            request = Request(rng.choice(KINDS), rng.choice(NOUNS))
            if request != self._wanted:
                yield request

    def expected(self, exchanges: int) -> str:
        """Return the answer to the question: the prefix, and the passage that is asked for."""
        return self.prefix + self.passage(self.places(exchanges)[self.asked])

    def prompt(self, exchanges: int, *, chat: bool) -> PromptText:
        """Return the conversation and the question, as messages or as one text."""
        kind, noun = self._wanted
        question = QUESTION.format(prefix=self.prefix, number=ORDINALS[self.asked], kind=kind, noun=noun)
        turns = self.conversation(exchanges)
        if not chat:
            transcript = ""
            for request, answer in turns:
                transcript += f"User: {request}\n\nAssistant: {answer}\n\n"
            return f"{transcript}User: {question}\n\nAssistant:"
        messages = []
        for request, answer in turns:
            messages += [Message("user", str(request)), Message("assistant", answer)]
        return (*messages, Message("user", question))


def score(case: Case, answer: str) -> float:
    """Return 0 for an answer that does not begin with the prefix, else the ratio of matching characters of what follows
    (`difflib.SequenceMatcher`), as openai/mrcr grades. White space before an answer does not count: a text to continue
    has it behind "Assistant:"."""
    (expected,) = case.expected
    prefix = expected[:PREFIX_LENGTH]
    passage = expected[PREFIX_LENGTH:]
    answer = answer.lstrip()
    if not answer.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, answer.removeprefix(prefix), passage).ratio()


def table(rows: Sequence[Row]) -> str:
    """Tabulate the mean scores by context, with their 95% intervals."""
    text = [f"{'context':>10}  prompt tokens     exchanges  cases     score  95% interval"]
    for context, group in grouped(rows, "length").items():
        exchanges = span(group, "exchanges")
        low, high = score_interval(group)
        text.append(
            f"{context:>10,} {mean_tokens(group):>14,.0f} {exchanges:>13} {len(group):>6} {mean(group):>9.1%} "
            f"{f'{100 * low:.1f}-{high:.1%}':>13}"
        )
    return "\n".join(text)
