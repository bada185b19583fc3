"""Reports of a run: a progress bar, metrics.jsonl, and optionally TensorBoard and Weights & Biases."""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ringformer.files.atomic import naming, write_whole
from ringformer.files.json_text import parse_json
from ringformer.files.run_layout import METRICS
from ringformer.runs.boards import GuardedBoard, TensorBoard, WeightsAndBiases
from ringformer.runs.config import Config


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; an empty list if the file does not exist.

    A truncated last line is ignored: the run was killed while writing it. Raises ValueError for any other line that is
    not a JSON object with a step.
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if type(row["step"]) is not int:
                raise TypeError
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not a row of metrics: {line[:60]!r}; delete the line") from None
        else:
            rows.append(row)
    return rows


def evaluation_losses(run_dir: Path) -> dict[int, float]:
    """Return the held-out losses that a run has reported, by step."""
    rows = read_metrics(run_dir / METRICS)
    return {row["step"]: row["eval_loss"] for row in rows if type(row.get("eval_loss")) is float}


class Reporter:
    """Writes metrics.jsonl, one JSON object per step or evaluation, and shows the progress of the run.

    A reporter that is opened at `step` drops the rows of later steps, which were written before an interruption. At
    step 0, which is evaluated again, it drops all rows. Only process 0 writes. `history` has the rows that were kept;
    `gaps` has a warning if rows are missing.

    Raises ValueError for an invalid metrics.jsonl.
    """

    def __init__(self, run_dir: Path, step: int, config: Config):
        active = jax.process_index() == 0
        self._steps = config.steps
        self._console = Console(stderr=True, quiet=not active)
        self.say: Callable[..., None] = partial(self._console.print, markup=False, highlight=False, soft_wrap=True)
        """Function that prints a line above the progress bar."""
        self._boards: list[GuardedBoard] = []  # before the bar: they may raise
        if active and config.wandb:
            open_wandb = partial(WeightsAndBiases, config.wandb, run_dir)
            setting = f"wandb={config.wandb!r}"
            self._boards.append(GuardedBoard("Weights & Biases", open_wandb, "wandb", setting, self.say))
        if active and config.tensorboard:
            open_events = partial(TensorBoard, run_dir)
            self._boards.append(GuardedBoard("TensorBoard", open_events, "tensorboardX", "tensorboard=True", self.say))
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=inf,  # steps may take minutes
            disable=not (active and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=config.steps, completed=step)
        self._bar.start()
        self._path = path = Path(run_dir) / METRICS
        kept = [row for row in read_metrics(path) if step and row["step"] <= step]
        self.history: list[dict[str, Any]] = kept
        trained = set[int]()
        self._evaluated = set[int]()
        for row in kept:
            if "learning_rate" in row:
                trained.add(row["step"])
            if "eval_tokens" in row:
                self._evaluated.add(row["step"])
        missing = step - len(trained)
        self.gaps: list[str] = []
        if missing > 0:
            self.gaps.append(
                f"warning: metrics.jsonl lacks the rows of {missing:,} of the {step:,} steps so far: plots have a gap"
            )
        self._file = None
        if active:
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("a", buffering=1)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Report the metrics of a step."""
        self._write(step, values)
        text = f"loss {values['loss']:.4f}" if "loss" in values else "no loss"
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
        if "mfu_palm" in values:
            text += f"  MFU (PaLM) {values['mfu_palm']:.1%}"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable and (step % max(1, self._steps // 20) == 0 or step in (1, self._steps)):
            seconds = self._bar.tasks[0].time_remaining  # None at the first step of this process, 0 at the last step
            left = f"  about {timedelta(seconds=seconds)} left" if seconds else ""
            self.say(f"step {step}/{self._steps}  {text}{left}")

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Report the metrics of an evaluation, from `evaluation.evaluate`."""
        self._write(step, values)
        if not values["eval_tokens"]:
            self.say(
                f"step {step}  the held-out batches have no token to train on: raise eval_batches, or examine the "
                "store with `ringformer data inspect`"
            )
            return
        numbers = [f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, float)]
        self.say(f"step {step}  {'  '.join(numbers)}")
        by_position = []
        for row in values["eval_by_position"]:
            by_position.append(f"{row['first']:,}: {row['loss']:.3f} ({row['tokens']:,})")
        self.say(f"  loss (tokens) from position {'  '.join(by_position)}")

    def evaluated(self, step: int) -> bool:
        """Return True if this step was evaluated before an interruption."""
        return step in self._evaluated

    def sync(self) -> None:
        """Wait until the rows are on disk, so that no checkpoint outlives the rows of its steps."""
        if self._file is not None:
            with naming(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Stop the progress bar and close the file and the boards."""
        self._bar.stop()
        for sink in (self._file, *self._boards):
            if sink is not None:
                sink.close()

    def _write(self, step, values):
        if self._file is not None:
            with naming(self._path):
                self._file.write(json.dumps({"step": step, **values}) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for row in values.get("eval_by_position", ()):
            numbers[f"eval_loss_to_{row['last']}"] = row["loss"]
        for board in self._boards:
            board.write(step, numbers)


PATIENCE = 100
"""Number of consecutive batches without a trained token (or, in chats, without a masked token) after which the store
counts as faulty."""


class BatchWatch:
    """Counts the batches without a token to train on and, in chats, the batches without a masked token.

    Single batches of either kind are normal: in a chat about a long document, a whole context may be part of a
    question, or of an answer. `PATIENCE` such batches in a row show that the store was built wrongly.
    """

    def __init__(self, chats: bool):
        self._kinds = {"no token to train on": "trained_tokens"}
        if chats:
            self._kinds["no question that is masked"] = "masked_tokens"
        self.counts: dict[str, int] = dict.fromkeys(self._kinds, 0)
        self._in_a_row = dict.fromkeys(self._kinds, 0)

    def see(self, step: int, values: dict[str, Any]) -> list[str]:
        """Count a step's batch and return remarks about it. Raises ValueError after `PATIENCE` odd batches in a row."""
        remarks = []
        for kind, name in self._kinds.items():
            if values[name]:
                self._in_a_row[kind] = 0
                continue
            self._in_a_row[kind] += 1
            self.counts[kind] += 1
            if self._in_a_row[kind] == PATIENCE:
                raise ValueError(
                    f"{PATIENCE} batches in a row, up to step {step}, have {kind}: examine the trained tokens with "
                    "`ringformer data inspect`, check the chat template and the roles, and rebuild the store"
                )
            if self.counts[kind] == 1:
                remarks.append(f"the batch of step {step} has {kind}; such batches are counted")
        return remarks

    def summary(self, steps: int) -> list[str]:
        """Summarise the odd batches of the first `steps` steps."""
        return [f"{count} of {steps} batches had {kind}" for kind, count in self.counts.items() if count]
