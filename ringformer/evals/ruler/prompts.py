"""Texts of RULER's prompts, as the generator of NVIDIA/RULER writes them; tests/evals/ruler/prompts.json has samples.

Nothing here is random: callers pass the content that they drew.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Prompt(NamedTuple):
    """A question, and the beginning of its answer; the model is given both."""

    question: str
    prefix: str

    @property
    def text(self) -> str:
        """Question and prefix as one text."""
        return self.question + self.prefix


ONE_NEEDLE = Prompt(
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {keys} mentioned in the provided text?",
    " The special magic {kind} for {keys} mentioned in the provided text is",
)
MANY_NEEDLES = Prompt(
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind}s afterwards.\n{context}\nWhat are all the special magic {kind}s for {keys} mentioned in the provided "
    "text?",
    " The special magic {kind}s for {keys} mentioned in the provided text are",
)
TRACKING = Prompt(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {value} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: ",
)
COMMON = Prompt(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
FREQUENT = Prompt(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
ANSWERING = Prompt(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {question}",
    " Answer:",
)


def filled(template: Prompt, **values: object) -> Prompt:
    """Fill in a template."""
    return Prompt(template.question.format(**values), template.prefix.format(**values))


def needle(kind: str, key: str, value: str) -> str:
    """Write the sentence that hides a value; `kind` is number or uuid."""
    return f"One of the special magic {kind}s for {key} is: {value}."


def among_lines(lines: Sequence[str], hidden: Sequence[str], places: Sequence[int]) -> str:
    """Insert hidden lines, the i-th before line `places[i]` of the original lines."""
    merged = list(lines)
    for place, line in sorted(zip(places, hidden, strict=True), reverse=True):
        merged.insert(place, line)
    return "\n".join(merged)


def among_sentences(sentences: Sequence[str], hidden: Sequence[str], depths: Sequence[int]) -> str:
    """Insert hidden sentences, in their order, at increasing `depths`, which are percentages of the sentences."""
    parts = []
    begin = 0
    for depth, sentence in zip(sorted(depths), hidden, strict=True):
        end = int(len(sentences) * (depth / 100))
        parts += [" ".join(sentences[begin:end]), sentence]
        begin = end
    return " ".join([*parts, " ".join(sentences[begin:])])


def asking(kind: str, context: str, keys: Sequence[str], values: int) -> Prompt:
    """Ask for all values of some keys, `values` in total."""
    *others, last = keys
    asked = f"{', '.join(others)}, and {last}" if others else last
    template = ONE_NEEDLE if values == 1 else MANY_NEEDLES
    return filled(template, kind=kind, context=context, keys=asked)


def chain(names: Sequence[str], value: int, noises: int, places: Sequence[int]) -> Prompt:
    """Write a chain of variables, one at each of `places` among sentences of noise; the first is assigned the value."""
    lines = [f"VAR {names[0]} = {value}"]
    for before, name in pairwise(names):
        lines.append(f"VAR {name} = VAR {before} ")
    context = among_lines([NOISE] * noises, lines, places)
    return filled(TRACKING, context=context, value=value, count=len(names))


def chain_behind_example(example: Prompt, variables: Sequence[str], asked: Prompt) -> Prompt:
    """Put a chain after an example chain and its answer."""
    return Prompt(f"{example.text} {' '.join(variables)}\n\n{asked.question}", asked.prefix)


def numbered(words: Sequence[str]) -> str:
    """Number the words: 1. FIRST 2. SECOND ..."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def list_behind_example(shown: Sequence[str], common: Sequence[str], words: Sequence[str]) -> Prompt:
    """Put a list of words after an example list, `shown`, and its `common` words."""
    example = filled(COMMON, context=numbered(shown))
    asked = filled(COMMON, context=numbered(words))
    return Prompt(f"{example.text} {numbered(common)}\n{asked.question}", asked.prefix)


def coded_text(words: Sequence[str]) -> Prompt:
    """Write a text of coded words, and of dots, which do not count as words."""
    return filled(FREQUENT, context=" ".join(words))


def documents(texts: Sequence[str], question: str) -> Prompt:
    """Put a question after numbered documents."""
    context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, 1))
    return filled(ANSWERING, context=context, question=question)
