"""The lines of a report, from the files that evaluations wrote."""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.evals import lines, needle
from ringformer.evals.case_file import CheckRow, Row, read_cases
from ringformer.evals.helmet import cases as helmet
from ringformer.evals.longbench import cases as longbench
from ringformer.evals.mrcr import conversations as mrcr
from ringformer.evals.nolima import associations as nolima
from ringformer.evals.perplexity import by_context
from ringformer.evals.perplexity.longppl import KEY
from ringformer.evals.perplexity.losses import ALL, Loss, check_row, losses_by_context
from ringformer.evals.ruler import tasks as ruler
from ringformer.evals.runner import row_checker
from ringformer.evals.tables import (
    accuracy_interval,
    column,
    contexts,
    grouped,
    interval_of_questions,
    mean,
    score_interval,
)
from ringformer.files.json_text import parse_json
from ringformer.files.run_layout import CASES, REPORT, RESULTS
from ringformer.files.untrusted import contained, read_object

SCORE = "score"
NATS = "nats per token"
"""Units: a share, from 0 to 1, and a loss."""
SHARES = ("acc", "exact_match")
"""Beginnings of the harness's metrics that are shares."""
DEVIATIONS = 1.959964
"""Standard errors on each side of a mean, in a 95% interval of a normal distribution."""


class Line(NamedTuple):
    """A number that an evaluation found."""

    evaluation: str
    """Name of the evaluation's folder."""
    task: str
    context: int | None
    """Tokens of the context, or lines of one that is given in lines."""
    cases: int | None
    """Cases, or documents of a loss; None if the harness does not say."""
    value: float
    interval: tuple[float, float] | None
    """95% interval; None if the evaluation has none."""
    unit: str


class Report(NamedTuple):
    """The lines of a model's evaluations."""

    lines: list[Line]
    left_out: dict[str, str]
    """Reason why a folder is not in the report, by its name."""


Read = Callable[[str, Mapping[str, Any], Sequence[Row]], Iterator[Line]]
"""Function from the name of a folder, settings and rows to lines."""


def gather(evals: Path, model: Mapping[str, Any]) -> Report:
    """Read the evaluations in a folder.

    Args:
      evals: folder of the folders of evaluations. model: the model's `model_folder.identity`.

    Evaluations of another checkpoint or of another model, and folders that no evaluation wrote, are left out. Raises
    ValueError for a file of cases that was changed.
    """
    report = Report([], {})
    for folder in sorted(evals.glob("*")):
        if not folder.is_dir() or folder.name == REPORT:
            continue
        if contained(folder, CASES).is_file():
            lines = _of_cases(folder, model)
        elif contained(folder, RESULTS).is_file():
            lines = _of_harness(folder, model)
        else:
            lines = f"it has neither {CASES} nor {RESULTS}"
        if isinstance(lines, str):
            report.left_out[folder.name] = lines
        else:
            report.lines.extend(lines)
    return report


def _other_model(settings: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return why an evaluation is not of the model; None if it is.

    Two conversions of the same weights may differ in their rope: so a folder that is still there must be the model's.
    """
    if settings.get("checkpoint") != model["checkpoint"]:
        return "it is of another checkpoint"
    run = str(settings.get("run"))
    if run != model["run"] and Path(run).exists():
        return f"it is of {run}"
    return None


def _of_cases(folder: Path, model: Mapping[str, Any]) -> list[Line] | str:
    """Return the lines of a file of cases, or why it is left out."""
    path = folder / CASES
    head = path.read_bytes().partition(b"\n")[0]
    try:
        name = parse_json(head)["evaluation"]
    except (ValueError, TypeError, LookupError):
        return "no evaluation wrote it"
    if name not in tuple(EVALUATIONS):
        return f"it is of {reprlib.repr(name)}, which no report knows"
    check, read = EVALUATIONS[name]
    try:
        settings, rows = read_cases(path, name, check)
    except ModuleNotFoundError as error:
        return f"its scores need the package {error.name}: pip install 'ringformer[longbench]'"
    if not rows:
        return "it has no case yet"
    settings = settings or {}
    if other := _other_model(settings, model):
        return other
    lines = list(read(folder.name, settings, list(rows.values())))
    if form := _form(settings):
        lines = [line._replace(task=f"{line.task}, {form}") for line in lines]
    return lines


def _form(settings: Mapping[str, Any]) -> str:
    """Return what a number was measured with, besides the model: another rope, a chat template, needles."""
    parts = []
    if settings.get("needles", 1) != 1:
        parts.append(f"{settings['needles']} needles")
    for key in ("chat", "direct"):
        if settings.get(key) is True:
            parts.append(key)
    for key, value in settings.items():
        if key == "rope_theta" or key.startswith("rope_scaling."):
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def _scores(
    folder: str, settings: Mapping[str, Any], rows: Sequence[Row], interval: Callable[..., Any] = score_interval
) -> Iterator[Line]:
    """Yield the mean scores by task and context."""
    by_task = grouped(rows, "task") if "task" in rows[0] else {folder: rows}
    for task, of_task in by_task.items():
        for context, of_context in contexts(of_task).items():
            yield Line(folder, task, context, len(of_context), mean(of_context), interval(of_context), SCORE)


def _losses(folder: str, settings: Mapping[str, Any], rows: Sequence[Row], parts: Mapping[str, str]) -> Iterator[Line]:
    """Yield the losses of parts by context, with the names of these parts."""
    for part, task in parts.items():
        for context, loss in losses_by_context(rows, part).items():
            yield _of_loss(folder, task.format_map(settings), context, loss)


def _perplexity(folder: str, settings: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[Line]:
    yield from _losses(folder, settings, rows, {by_context.LAST: "the same last {last:,} tokens"})
    longest = max(column(rows, "length"))
    for first, loss in by_context.by_position(rows).items():
        yield _of_loss(folder, f"positions {first:,} to {min(2 * first, longest) - 1:,}", longest, loss)


def _of_loss(folder: str, task: str, context: int, loss: Loss) -> Line:
    return Line(folder, task, context, loss.documents, loss.nats, loss.interval, NATS)


EVALUATIONS: dict[str, tuple[CheckRow, Read]] = {
    "lines": (row_checker(lines.score), partial(_scores, interval=accuracy_interval)),
    "needle": (row_checker(needle.score), _scores),
    "ruler": (row_checker(ruler.score), _scores),
    "mrcr": (row_checker(mrcr.score), _scores),
    "longbench": (row_checker(longbench.score), _scores),
    "helmet": (row_checker(helmet.score), partial(_scores, interval=interval_of_questions)),
    "nolima": (row_checker(nolima.score), _scores),
    "perplexity": (by_context.check_row, _perplexity),
    "sliding": (check_row, partial(_losses, parts={ALL: "windows of stride {stride:,}"})),
    "longppl": (lambda row: check_row(row, KEY), partial(_losses, parts={KEY: "key tokens", ALL: "all tokens"})),
}
"""Check of a row, and reader of the rows, by the evaluation's name."""


def _of_harness(folder: Path, model: Mapping[str, Any]) -> list[Line] | str:
    """Return the lines of the harness's results, or why they are left out."""
    content = read_object(folder, RESULTS)
    try:
        if other := _other_model(content["model"], model):
            return other
        counts = content.get("n-samples", {})
        lines = []
        for task, metrics in content["results"].items():
            of_task = counts.get(task)  # of tasks, not of groups
            cases = None if of_task is None else int(of_task["effective"])
            for key, value in metrics.items():
                metric, _, rule = key.partition(",")
                error = metrics.get(f"{metric}_stderr,{rule}")
                if metric.endswith("_stderr") or not _is_number(value):
                    continue
                name = f"{task}, {metric}"
                if rule not in ("none", ""):
                    name += f" ({rule})"
                interval = _interval(value, error, metric)
                lines.append(Line(folder.name, name, content["length"], cases, float(value), interval, metric))
        return lines
    except (TypeError, LookupError, AttributeError, ValueError):
        return f"its {RESULTS} has another form than the harness's"


def _interval(value: float, error: Any, metric: str) -> tuple[float, float] | None:
    """Return the 95% interval of a metric of the harness; None if it has no standard error."""
    if not _is_number(error):
        return None
    spread = DEVIATIONS * float(error)
    if metric.startswith(SHARES):
        return max(0.0, value - spread), min(1.0, value + spread)
    return value - spread, value + spread


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)
