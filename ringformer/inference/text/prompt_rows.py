"""Prompts of a file of JSON lines, answered row by row into another: `ringformer generate --prompts`."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringformer.files.atomic import append_line
from ringformer.inference.rows import check_room
from ringformer.inference.sampling import Sampling
from ringformer.inference.text.run_text import Prompt, RunText
from ringformer.inference.text.text_generator import TextGenerator, shared_tokens

Row = dict[str, Any]


class PromptRows:
    """Rows of a file of prompts, without those that the file of answers has.

    A row is an object with `prompt`; its answer is the same object with `text` or, for a row that cannot be answered,
    with `error`. Answers are in the order of the prompts. Blank lines are no rows.

    Raises:
      ValueError: if the answers are not those of these prompts.
      FileNotFoundError: if there are no prompts.
    """

    def __init__(self, path: Path, out: Path, text: RunText, *, chat: bool, max_new_tokens: int, limit: int):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file of prompts {path}")
        lines = [(number, line) for number, line in enumerate(path.read_bytes().splitlines(), 1) if line.strip()]
        rows = [_read(line) for _, line in lines]
        answered = _answered(out)
        for number, line in enumerate(answered, 1):
            if number > len(rows):
                raise ValueError(f"{out}:{number} does not answer a row of {path}: choose another --out")
            if _asked(_read(line)[0]) != _asked(rows[number - 1][0]):
                place = f"{path}:{lines[number - 1][0]}"
                raise ValueError(f"{out}:{number} does not answer {place}: choose another --out")
        self._out = out
        self._path = path
        self.failed: int = 0
        self._numbers = [number for number, _ in lines[len(answered) :]]
        """Line of each row in the file."""
        self._rows = [row for row, _ in rows[len(answered) :]]
        self._prompts: list[Prompt | str] = []
        """Prompts of the rows, or the reason why there is none."""
        for row, error in rows[len(answered) :]:
            try:
                if error:
                    raise ValueError(error)
                prompt = text.prompt(row["prompt"], chat)
                check_room(len(prompt.ids), max_new_tokens, limit)
                self._prompts.append(prompt)
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
            batches = model.complete_batches(prompts, batch_size, max_new_tokens, sampling, stop)
            texts = itertools.chain.from_iterable(batches)
            for number in range(start, end):
                row = self._rows[number]
                prompt = self._prompts[number]
                if isinstance(prompt, Prompt):
                    answer = {"text": next(texts)}
                else:
                    answer = {"error": prompt}
                    self.failed = self.failed + 1
                    print(f"{self._path}:{self._numbers[number]}: {prompt}", file=sys.stderr)
                append_line(self._out, json.dumps(row | answer))

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


def _answered(out: Path) -> list[bytes]:
    """Return the rows that are answered, after removing one that a killed process wrote in part."""
    if not out.exists():
        return []
    rows = out.read_bytes().splitlines(keepends=True)
    if rows and not rows[-1].endswith(b"\n"):
        rows = rows[:-1]
        out.write_bytes(b"".join(rows))
    return rows


def _read(line: bytes) -> tuple[Row, str]:
    """Return the object in a line, and why it is no prompt; empty if it is one."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return {"line": line.decode(errors="replace")}, f"not a line of JSON: {error}"
    no_prompt = "not an object with a text 'prompt'"
    if not isinstance(row, dict):
        return {"line": row}, no_prompt
    if not isinstance(row.get("prompt"), str):
        return row, no_prompt
    return row, ""


def _asked(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("text", "error")}
