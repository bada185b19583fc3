"""The cases of HELMET: prompts whose documents end earlier if they are too long, as in its `model_utils.py`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ringformer.evals.cases import Case, Tokens, room_for_prompt
from ringformer.evals.helmet.forms import Question
from ringformer.evals.helmet.scores import score_of
from ringformer.evals.helmet.tasks import BY_NAME, Task


def prompt_of(task: Task, fields: Mapping[str, str], chat: bool) -> str:
    """Return a prompt: a user's message for a chat template, and without one also the beginning of the answer."""
    form = task.user if chat else f"{task.user}\n{task.answer}"
    return re.sub(r"\{(\w+)\}", lambda match: fields[match[1]], form)


def fitting_prompt(
    task: Task, fields: Mapping[str, str], chat: bool, most: int, tokens: Tokens, count: Callable[[str], int]
) -> tuple[str, int]:
    """Return a prompt of at most `most` tokens as `count` counts them, and the tokens that its context lost at its end.

    Raises ValueError if the rest of the prompt does not fit.
    """
    prompt = prompt_of(task, fields, chat)
    excess = count(prompt) - most
    if excess <= 0:
        return prompt, 0
    context = list(tokens.encode(fields["context"]))
    cut = 0
    while excess > 0:
        cut += excess
        if cut >= len(context):
            raise ValueError(f"a context with room for {most:,} tokens of a prompt is too short for {task.name}")
        shorter = tokens.decode(context[: len(context) - cut])
        prompt = prompt_of(task, {**fields, "context": shorter}, chat)
        excess = count(prompt) - most
    return prompt, cut


def cases_of_length(
    length: int,
    task: Task,
    questions: Sequence[Sequence[Question]],
    chat: bool,
    tokens: Tokens,
    count: Callable[[str], int],
) -> Iterator[Case]:
    """Yield the cases of a task. Prompt and answer fit in `length` tokens; the label `cut` says how many tokens the
    documents lost, and `place` is the number of the row among those of its question.

    Args:
      questions: each with its rows.
      chat: True for the message of a chat template, which `count` counts, too.
    """
    most = room_for_prompt(length, task.max_new_tokens)
    for index, places in enumerate(questions):
        for place, question in enumerate(places):
            prompt, cut = fitting_prompt(task, question.fields, chat, most, tokens, count)
            labels = {"task": task.name, "place": place, "cut": cut, "relevant": question.relevant}
            yield Case(length, index, prompt, question.answers, task.max_new_tokens, labels)


def score(case: Case, answer: str) -> float:
    """Return the score of an answer, from 0 to 1."""
    return score_of(BY_NAME[case.labels["task"]], answer, case.expected, case.labels["relevant"])
