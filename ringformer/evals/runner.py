"""Runner of cases: a model answers them in batches, and they are scored and saved one by one."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ringformer.evals.case_file import CaseFile, CheckRow, Row
from ringformer.evals.cases import Case, PromptText
from ringformer.evals.tables import mean
from ringformer.inference.text.text_generator import TextGenerator


class Answering(NamedTuple):
    """Model and options that answer cases."""

    model: TextGenerator
    capacity: int
    """Most tokens that the model supports, prompt and answer together."""
    batch_size: int
    """Cases of one length to answer at a time."""
    chat: bool
    """True to format prompts with the model's chat template."""

    def tokens(self, prompt: PromptText, prefix: str = "") -> int:
        """Count the tokens that the model is given for a prompt and the beginning of its answer."""
        return len(self.model.encode(prompt, chat=self.chat, prefix=prefix))

    def answers(self, cases: Sequence[Case]) -> list[str]:
        """Return the model's answer to each of some cases; a long text with which all of them begin is read once."""
        return self.model.complete(
            [case.prompt for case in cases],
            max_new_tokens=max(case.max_new_tokens for case in cases),
            batch_size=self.batch_size,
            chat=self.chat,
            prefixes=[case.prefix for case in cases],
        )


Score = Callable[[Case, str], float]


def answer_cases(
    groups: Iterable[Sequence[Case]],
    answering: Answering,
    score: Score,
    file: CaseFile,
    say: Callable[[str], None],
) -> None:
    """Answer the cases of `groups`, each of about one length, that are not in the file yet. Questions about a document
    are a group.

    Prompts are never truncated: all prompts of a group are measured before any is answered.

    Raises:
      ValueError: for a prompt that does not fit, and for a row of the file that does not match its answer.
    """
    for group in groups:
        say(_answer_group(group, answering, score, file))


def _answer_group(group: Sequence[Case], answering: Answering, score: Score, file: CaseFile) -> str:
    prompt_tokens = check_fit(group, answering)
    missing = file.missing(group)

    def row_of(case: Case, answer: str) -> Row:
        return {
            "key": case.key,
            "prompt_hash": case.prompt_hash,
            "length": case.length,
            "index": case.index,
            **case.labels,
            "prompt_tokens": prompt_tokens[case.key],
            "expected": list(case.expected),
            "answer": answer,
            "score": score(case, answer),
        }

    for case in group:
        if case.key in file.rows:
            file.check(row_of(case, file.rows[case.key]["answer"]))
    size = answering.batch_size
    if "question" in group[0].labels:
        size = len(missing) or 1
    file.measure(missing, size, lambda batch: map(row_of, batch, answering.answers(batch)))
    score_of_group = mean([file.rows[case.key] for case in group])
    return f"{describe(group)}: {len(group)} cases, {len(missing)} of them new, score {score_of_group:.1%}"


def describe(group: Sequence[Case]) -> str:
    """Describe the task, length and document that the cases of a group share."""
    case = group[0]
    size = f"{case.labels['num_lines']:,} lines" if case.length is None else f"{case.length:,} tokens"
    if "task" in case.labels:
        return f"{case.labels['task']}, {size}"
    if "question" in case.labels:
        return f"{size}, document {case.index}"
    return size


def check_fit(cases: Iterable[Case], answering: Answering) -> dict[str, int]:
    """Count the prompt tokens of each case, by key. Raises ValueError for a case that leaves no room for its answer."""
    prompt_tokens = {}
    for case in cases:
        tokens = prompt_tokens[case.key] = answering.tokens(case.prompt, case.prefix)
        room = min(case.length or answering.capacity, answering.capacity)
        if tokens + case.max_new_tokens > room:
            raise ValueError(
                f"case {case.index} of {describe([case])} has {tokens:,} tokens and may generate "
                f"{case.max_new_tokens}, more than the {room:,} that fit: prompts are never truncated; raise --lengths"
            )
    return prompt_tokens


FIELDS = frozenset(("key", "prompt_hash", "length", "index", "prompt_tokens", "expected", "answer", "score"))
"""Fields of a row, besides the labels of its case."""


def row_checker(score: Score) -> CheckRow:
    """Return a function that refuses rows whose key does not match their fields, or whose score is not that of their
    answer."""

    def check(row: Row) -> None:
        expected = tuple(map(str, row["expected"]))
        labels = {name: value for name, value in row.items() if name not in FIELDS}
        case = Case(row["length"], row["index"], "", expected, 0, labels)
        whole = row.keys() >= FIELDS and expected and row["key"] == case.key
        if not whole or row["score"] != score(case, row["answer"]):
            raise ValueError("not written by an evaluation")

    return check
