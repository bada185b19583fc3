"""Prompts of a file of JSON lines, answered row by row into another: `ringformer generate --prompts`."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.files.json_text import parse_json
from ringformer.files.resumed_lines import ResumedLines
from ringformer.inference.rows import check_room
from ringformer.inference.sampling import Sampling
from ringformer.inference.text.run_text import Prompt, RunText
from ringformer.inference.text.text_generator import TextGenerator, shared_tokens

Row = dict[str, Any]


ANSWERED = "text", "error"
"""Fields that an answer adds to its row: the answer, or why there is none."""


class PromptLine(NamedTuple):
    """A row of a file of prompts."""

    number: int
    """Its line in the file, from 1."""
    row: Row
    error: str
    """The reason why it has no prompt; empty if it has one."""


def read_prompts(path: Path) -> list[PromptLine]:
    """Read a file of prompts. Blank lines are no rows.

    Raises:
      ValueError: if a row already has a `text` or an `error`.
      FileNotFoundError: if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of prompts {path}")
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        row, error = _read(line)
        for field in ANSWERED:
            if field in row:
                raise ValueError(
                    f"{path}:{number} has a {field!r} already, which its answer would replace: rename the field, "
                    "or leave it out"
                )
        prompts.append(PromptLine(number, row, error))
    return prompts


class PromptRows:
    """Rows of a file of prompts, without those that the file of answers has.

    A row is an object with `prompt`; its answer is the same object with `text` or, for a row that cannot be answered,
    with `error`. Answers are in the order of the prompts.

    Raises ValueError if the answers are not those of these prompts.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[PromptLine],
        out: ResumedLines,
        text: RunText,
        *,
        chat: bool,
        max_new_tokens: int,
        limit: int,
    ):
        answers = [_read(line)[0] for line in out.lines]
        for number, answer in enumerate(answers, 1):
            if number > len(prompts):
                raise ValueError(f"{out.path}:{number} does not answer a row of {path}: choose another --out")
            asked = {key: value for key, value in answer.items() if key not in ANSWERED}
            prompt = prompts[number - 1]
            if asked != prompt.row:
                raise ValueError(f"{out.path}:{number} does not answer {path}:{prompt.number}: choose another --out")
        self._out = out
        self._path = path
        self.failed: int = sum("error" in answer for answer in answers)
        """Rows that could not be answered, now or before."""
        self._answered = sum("text" in answer for answer in answers)
        self._lines = prompts[len(answers) :]
        self._prompts: list[Prompt | str] = []
        """Prompts of the rows, or the reason why there is none."""
        for line in self._lines:
            try:
                if line.error:
                    raise ValueError(line.error)
                prompt_of_row = text.prompt(line.row["prompt"], chat)
                check_room(len(prompt_of_row.ids), max_new_tokens, limit)
                self._prompts.append(prompt_of_row)
            except ValueError as cause:
                self._prompts.append(str(cause))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 0 without any."""
        return max((len(prompt.ids) for prompt in self._prompts if isinstance(prompt, Prompt)), default=0)

    def answer(
        self, model: TextGenerator, batch_size: int, max_new_tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> None:
        """Answer all rows, and write each answer when it is there."""
        for start, end in self._groups():
            prompts = [prompt for prompt in self._prompts[start:end] if isinstance(prompt, Prompt)]
            batches = model.complete_batches(prompts, batch_size, max_new_tokens, sampling, stop, self._answered)
            texts = itertools.chain.from_iterable(batches)
            for number in range(start, end):
                line = self._lines[number]
                prompt = self._prompts[number]
                if isinstance(prompt, Prompt):
                    answer = {"text": next(texts)}
                    self._answered += 1
                else:
                    answer = {"error": prompt}
                    self.failed = self.failed + 1
                    print(f"{self._path}:{line.number}: {prompt}", file=sys.stderr)
                self._out.append(json.dumps(line.row | answer))

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield stretches of rows whose prompts begin with the same text, at least half of the shortest one."""
        start = 0
        ids = list[list[int]]()
        for number, prompt in enumerate(self._prompts):
            if not isinstance(prompt, Prompt):
                continue
            new = prompt.ids
            if ids and 2 * shared_tokens([ids[0], new]) < min(map(len, [*ids, new])):
                yield start, number
                start = number
                ids = []
            ids.append(new)
        if self._prompts:
            yield start, len(self._prompts)


def _read(line: bytes) -> tuple[Row, str]:
    """Return the object in a line, and why it is no prompt; empty if it is one."""
    try:
        row = parse_json(line)
    except ValueError as error:
        return {"line": line.decode(errors="replace")}, f"not a line of JSON: {error}"
    no_prompt = "not an object with a text 'prompt'"
    if not isinstance(row, dict):
        return {"line": row}, no_prompt
    if not isinstance(row.get("prompt"), str):
        return row, no_prompt
    return row, ""
