"""Cases answered in batches by a model, scored and kept one by one."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ringformer.evals.case_file import CaseFile, CheckRow, Row
from ringformer.evals.cases import Case, TextModel


class Answering(NamedTuple):
    """How cases are answered."""

    model: TextModel
    capacity: int
    """Tokens that the model takes, prompt and answer together."""
    batch_size: int
    """Cases of a length that are answered at once."""
    chat: bool
    """Prompts go through the model's chat template."""

    def tokens(self, prompt: str, prefix: str = "") -> int:
        """The tokens that the model is given for a prompt, and for how its answer begins."""
        return len(self.model.encode(prompt, chat=self.chat, prefix=prefix))


Score = Callable[[Case, str], float]


def answer_cases(
    groups: Iterable[Sequence[Case]],
    answering: Answering,
    score: Score,
    file: CaseFile,
    say: Callable[[str], None],
) -> None:
    """Answer what of `groups`, each of about one length, is not in the file yet.

    No prompt is ever cut: before anything of a group is computed each of its prompts is measured.

    Raises:
      ValueError: for a prompt that does not fit, and for a row of the file that is not what its answer gives.
    """
    for group in groups:
        prompt_tokens = check_fit(group, answering)
        pending = [case for case in group if not file.done(case.key, case.prompt_hash)]
        for case in group:
            if found := file.rows.get(case.key):
                answer = str(found.get("answer"))
                file.check(_row(case, answer, score(case, answer), prompt_tokens[case.key]))
        for first in range(0, len(pending), answering.batch_size):
            batch = pending[first : first + answering.batch_size]
            for case, answer in zip(batch, _answers(batch, answering), strict=True):
                file.add(_row(case, answer, score(case, answer), prompt_tokens[case.key]))
        mean = sum(file.rows[case.key]["score"] for case in group) / max(1, len(group))
        say(f"{describe(group)}: {len(group)} cases, {len(pending)} of them new, score {mean:.1%}")


def describe(group: Sequence[Case]) -> str:
    """What the cases of a group have in common, for a person."""
    case = group[0]
    size = f"{case.labels['num_lines']:,} lines" if case.length is None else f"{case.length:,} tokens"
    return f"{case.labels['task']}, {size}" if "task" in case.labels else size


def check_fit(cases: Sequence[Case], answering: Answering) -> dict[str, int]:
    """The tokens of each case's prompt, by its key. Raises ValueError for one that leaves no room for its answer."""
    found = {}
    for case in cases:
        tokens = found[case.key] = answering.tokens(case.prompt, case.prefix)
        room = answering.capacity if case.length is None else min(case.length, answering.capacity)
        if tokens + case.max_new_tokens > room:
            raise ValueError(
                f"case {case.index} of {describe([case])} has {tokens:,} tokens and {case.max_new_tokens} are to "
                f"follow, more than the {room:,} that fit: prompts are never cut; raise --lengths"
            )
    return found


def _answers(batch: Sequence[Case], answering: Answering) -> list[str]:
    """The answer to each case; the last batch of a length is filled up, so that all have the same shape."""
    filled = [*batch, *[batch[-1]] * (answering.batch_size - len(batch))]
    new_tokens = max(case.max_new_tokens for case in batch)
    prompts, prefixes = [case.prompt for case in filled], [case.prefix for case in filled]
    answers = answering.model.complete(prompts, max_new_tokens=new_tokens, chat=answering.chat, prefixes=prefixes)
    return answers[: len(batch)]


def row_checker(score: Score) -> CheckRow:
    """What refuses a row that `answer_cases` did not write: its key is that of its fields, its score its answer's."""

    def check(row: Row) -> None:
        labels = {name: value for name, value in row.items() if name not in FIELDS}
        expected = tuple(map(str, row["expected"]))
        case = Case(row["length"], row["index"], "", expected, 0, labels)
        whole = row.keys() >= FIELDS and expected and row["key"] == case.key
        if not whole or row["score"] != score(case, row["answer"]):
            raise ValueError("not what an evaluation writes")

    return check


FIELDS = frozenset(("key", "prompt_hash", "length", "index", "prompt_tokens", "expected", "answer", "score"))
"""Of a row, besides the labels of its case."""


def _row(case: Case, answer: str, score: float, prompt_tokens: int) -> Row:
    return {
        "key": case.key,
        "prompt_hash": case.prompt_hash,
        "length": case.length,
        "index": case.index,
        **case.labels,
        "prompt_tokens": prompt_tokens,
        "expected": list(case.expected),
        "answer": answer,
        "score": score,
    }
