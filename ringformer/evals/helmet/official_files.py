"""HELMET's data files: the rows of each task, of which the authors' code draws a hundred questions, and the solved
examples that come before them.

The folder is a checkout of princeton-nlp/HELMET into which `data.tar.gz` of the dataset princeton-nlp/HELMET was
unpacked. Nothing is downloaded.
"""

import hashlib
import random
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from ringformer.evals.helmet.forms import SHOTS, Question, Row
from ringformer.evals.helmet.tasks import BY_NAME, LENGTHS, Task
from ringformer.files.json_text import parse_json

HOW = (
    "name the folder of github.com/princeton-nlp/HELMET into which data.tar.gz of the dataset princeton-nlp/HELMET was "
    "unpacked (data/)"
)
SEED = 42
"""Seed of the authors' draws."""
KEYS = ("qid", "id", "question")
"""Fields that may tell one question from another; the first one that a row has does. Several rows ask the same one,
with its document at other places."""
MOST_VIEWS = 1000
"""Questions of PopQA count whose subjects had fewer views."""


def tasks_of(folder: Path, lengths: Sequence[int], names: Sequence[str] | None) -> list[Task]:
    """Return the tasks of these names, or those of which the folder has the files of all lengths.

    Raises FileNotFoundError for a folder without such files, and ValueError for an unknown task or length.
    """
    for length in lengths:
        if length not in LENGTHS:
            sizes = ", ".join(map(str, LENGTHS))
            raise ValueError(f"--lengths: HELMET has no files for {length:,} tokens; it has some for {sizes}")
    for name in names or ():
        if name not in BY_NAME:
            raise ValueError(f"--tasks: HELMET has no {name} that no model judges; it has {', '.join(BY_NAME)}")
    if not (folder / "data").is_dir():
        raise FileNotFoundError(f"{folder} is no folder of HELMET: {HOW}")
    present = []
    for name in names or BY_NAME:
        task = BY_NAME[name]
        missing = [length for length in lengths if not file_of(folder, task, length).is_file()]
        if missing and names:
            raise FileNotFoundError(f"there is no {file_of(folder, task, missing[0])}: {HOW}")
        if not missing:
            present.append(task)
    if not present:
        raise FileNotFoundError(f"{folder}/data has no task with files for all --lengths: {HOW}")
    return present


def file_of(folder: Path, task: Task, length: int) -> Path:
    """Return the file of a task's rows for one of the `LENGTHS`."""
    return folder / "data" / task.file.format(size=task.sizes[LENGTHS.index(length)])


def read_questions(folder: Path, task: Task, length: int, number: int | None) -> list[list[Question]]:
    """Read a task at one of the `LENGTHS`: `number` questions that the authors' seed draws, or all, each with its rows.

    Raises FileNotFoundError for a file that is not there, and ValueError for a row of another form.
    """
    path = file_of(folder, task, length)
    rows = _rows(path, task)
    questions: list[list[Question]] = []
    if not task.examples:
        for row in _shuffled(rows, SEED)[:number]:
            questions.append([task.form.question(row, ())])
        return questions
    key = next(key for key in KEYS if key in rows[0])
    _check_names(path, rows, key)
    path_of_examples = folder / "data" / task.examples
    examples = _rows(path_of_examples, task)
    _check_names(path_of_examples, examples, key)
    drawn = _drawn_questions(rows, key, number)
    if task.examples_are == "not asked" and len(examples) > 2 * sum(map(len, drawn.values())):
        examples = [row for row in examples if row[key] not in drawn]
    for name, rows_of_question in drawn.items():
        solved = _solved(name, key, task, examples)
        if len(solved) < SHOTS:
            raise ValueError(
                f"{path_of_examples} has fewer than {SHOTS} examples that are other questions than {name!r}"
            )
        questions.append([task.form.question(row, solved) for row in rows_of_question])
    return questions


def _rows(path: Path, task: Task) -> list[Row]:
    """Read the rows of a task from a file of JSON lines, of PopQA the rare ones.

    Raises FileNotFoundError for no file, and ValueError for a line of another form and for no row.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: {HOW}")
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            is_right = task.form.is_right(row)
            is_wanted = not task.rare or row["s_pop"] < MOST_VIEWS
        except (ValueError, TypeError, LookupError, AttributeError):
            is_right = False
        if not is_right:
            raise ValueError(f"{path}:{number} is no row of this file of HELMET")
        if is_wanted:
            rows.append(row)
    if not rows:
        wanted = "rows of rare subjects" if task.rare else "rows"
        raise ValueError(f"{path} has no {wanted}: {HOW}")
    return rows


def _check_names(path: Path, rows: Sequence[Row], key: str) -> None:
    """Raise ValueError if a row has no text that tells its question from others."""
    for row in rows:
        if type(row.get(key)) is not str:
            raise ValueError(f"{path} has a row whose {key!r} is no text: {str(row['ctxs'])[:60]}")


def _shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows in the order of the method `shuffle` of a dataset."""
    return [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]


def _drawn_questions(rows: Sequence[Row], key: str, number: int | None) -> dict[str, list[Row]]:
    """Return all rows of `number` questions by their keys, or of all questions."""
    by_name: dict[str, list[Row]] = {}
    for row in sorted(rows, key=itemgetter(key)):
        by_name.setdefault(row[key], []).append(row)
    if number is None:
        return by_name
    drawn = random.Random(SEED).sample(list(by_name), min(number, len(by_name)))
    return {name: by_name[name] for name in sorted(drawn)}


def _solved(name: str, key: str, task: Task, examples: Sequence[Row]) -> list[Row]:
    """Return the examples that the authors' code shuffles to the front for a question: each is another one."""
    if task.examples_are != "of another split":
        examples = [example for example in examples if example[key] != name]
    seed = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2**31
    chosen: dict[str, Row] = {}
    for example in _shuffled(examples, seed):
        chosen.setdefault(example[key], example)
        if len(chosen) == SHOTS:
            break
    return list(chosen.values())
