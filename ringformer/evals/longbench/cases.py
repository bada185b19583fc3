"""The cases of LongBench: prompts of which the middle is left out if they are too long, as its `pred.py` does."""

from collections.abc import Callable, Iterator

from ringformer.evals.cases import Case, Tokens, room_for_prompt
from ringformer.evals.longbench.official_files import Task
from ringformer.evals.longbench.scores import PLAIN, base_task, score_of


def without_middle(text: str, most: int, tokens: Tokens, count: Callable[[str], int]) -> tuple[str, int]:
    """Return a text of at most `most` tokens as `count` counts them: its first and last halves, and the number of
    tokens that were left out.

    The official code cuts the tokens of the prompt to a number that leaves room for the template. Here the room is
    exact: what the template and the seam add is taken off again.
    """
    if count(text) <= most:
        return text, 0
    ids = list(tokens.encode(text))
    keep = min(most, len(ids) - 1)
    while keep > 1:
        half = keep // 2
        cut = tokens.decode(ids[:half]) + tokens.decode(ids[-half:])
        excess = count(cut) - most
        if excess <= 0:
            return cut, len(ids) - 2 * half
        keep -= max(excess, 2)
    raise ValueError(f"a context with room for {most} tokens of a prompt is too short for LongBench")


def cases_of_length(
    length: int, task: Task, number: int | None, tokens: Tokens, count: Callable[[str], int]
) -> Iterator[Case]:
    """Yield the cases of a task, or the first `number` of them. Prompt and answer fit in `length` tokens; the label
    `cut` says how many tokens were left out of the middle.

    Args:
      count: tokens that the model is given for a prompt, with a chat template if it has one.
    """
    most = room_for_prompt(length, task.max_new_tokens)
    for index, question in enumerate(task.questions[:number]):
        prompt, cut = without_middle(task.text(question), most, tokens, count)
        labels = {"task": task.name, "cut": cut, "classes": list(question.classes)}
        yield Case(length, index, prompt, question.answers, task.max_new_tokens, labels)


def is_plain(task: str) -> bool:
    """Return whether a task is a text to continue, without a chat template."""
    return base_task(task) in PLAIN


def score(case: Case, answer: str) -> float:
    """Return the score of an answer, from 0 to 1."""
    return score_of(case.labels["task"], answer, case.expected, case.labels["classes"])
