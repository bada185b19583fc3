"""LongBench's files: prompts and numbers of new tokens in `config/`, and the rows of its tasks in `data/`.

The folder is a checkout of THUDM/LongBench (`LongBench/`), in which the content of the dataset's `data.zip` lies.
Nothing is downloaded.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.evals.longbench.scores import METRICS, base_task, fault_of
from ringformer.files.hashes import content_hash
from ringformer.files.json_text import parse_json
from ringformer.files.untrusted import read_object

PROMPTS = "dataset2prompt.json"
NEW_TOKENS = "dataset2maxlen.json"
HOW = (
    "name the folder LongBench of github.com/THUDM/LongBench, with config/, into which data.zip of the dataset "
    "THUDM/LongBench was unpacked (data/)"
)


class Question(NamedTuple):
    """A row of a task."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    """Names of the classes, of tasks that classify; else none."""


class Task(NamedTuple):
    """A task with its rows."""

    name: str
    prompt: str
    """Text with {context} and {input}."""
    max_new_tokens: int
    questions: list[Question]

    def text(self, question: Question) -> str:
        """Return the prompt of a question."""
        return re.sub(r"\{(context|input)\}", lambda match: getattr(question, match[1]), self.prompt)


def read_tasks(folder: Path, names: Sequence[str] | None) -> list[Task]:
    """Read tasks by name, or all that the folder has.

    Raises FileNotFoundError for a folder that is not LongBench's, and ValueError for a task that it does not have or
    for a row of another form.
    """
    if not (folder / "config" / PROMPTS).is_file() or not (folder / "data").is_dir():
        raise FileNotFoundError(f"{folder} is no folder of LongBench: {HOW}")
    prompts = read_object(folder / "config", PROMPTS)
    new_tokens = read_object(folder / "config", NEW_TOKENS)
    present = {}
    for path in sorted((folder / "data").glob("*.jsonl")):
        if base_task(path.stem) in METRICS:
            present[path.stem] = path
    if not present:
        raise ValueError(f"{folder}/data has no file of a task, such as qasper.jsonl: {HOW}")
    unknown = [name for name in names or () if name not in present]
    if unknown:
        raise ValueError(f"{folder}/data has no {', '.join(unknown)}; it has: {', '.join(present)}")
    tasks = []
    for name in names or present:
        base = base_task(name)
        prompt = prompts.get(base)
        most = new_tokens.get(base)
        if type(prompt) is not str or "{context}" not in prompt or type(most) is not int or most < 1:
            raise ValueError(f"{folder}/config has no prompt with {{context}}, or no number of new tokens, for {base}")
        questions = []
        for number, line in enumerate(present[name].read_bytes().splitlines(), 1):
            if line.strip():
                questions.append(_question(line, name, f"{present[name]}:{number}"))
        if not questions:
            raise ValueError(f"{present[name]} has no rows: {HOW}")
        tasks.append(Task(name, prompt, most, questions))
    return tasks


def _question(line: bytes, task: str, name: str) -> Question:
    """Return the question in a line. Raises ValueError for one of another form."""
    try:
        row: dict[str, Any] = parse_json(line)
        texts = row["context"], row["input"]
        answers = row["answers"]
        classes = row.get("all_classes") or []
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(f"{name} is no row of LongBench, with context, input, answers and all_classes") from None
    are_lists = type(answers) is list and type(classes) is list
    if not are_lists or not answers or not all(type(text) is str for text in (*texts, *answers, *classes)):
        raise ValueError(f"{name}: answers must be a list of texts, and context and input texts")
    if fault := fault_of(task, answers, classes):
        raise ValueError(f"{name}: {fault}")
    return Question(*texts, tuple(answers), tuple(classes))


def config_hash(folder: Path) -> str:
    """Return the hash of the prompts and of the numbers of new tokens."""
    prompts = (folder / "config" / PROMPTS).read_bytes()
    return content_hash(prompts + (folder / "config" / NEW_TOKENS).read_bytes())
