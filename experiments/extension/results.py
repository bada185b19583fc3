"""Results of the study, from the files that its commands wrote."""

import json
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from experiments.extension import chats, continuations
from experiments.extension.plans import RELEASED, RINGS, THETA, Plan, loss_folder
from ringformer.evals.case_file import Row, read_cases
from ringformer.evals.intervals import bootstrap, wilson
from ringformer.evals.lines import score as lines_score
from ringformer.evals.perplexity import by_context
from ringformer.evals.perplexity.losses import mean_loss
from ringformer.evals.ruler.tasks import score as ruler_score
from ringformer.evals.runner import Score, row_checker
from ringformer.evals.tables import grouped, mean, score_interval
from ringformer.runs.metrics import read_metrics

WHAT = "measured: the extension of a released model (experiments/extend_released.sh)"
"""Marks a file of results as this study's."""
FIRST = 128
"""Position from which losses are listed: a document's first tokens depend on nothing that an extension changes."""

GPU_FORM = "gpu"
Results = dict[str, Any]


def rounded(numbers: Iterable[float]) -> list[float]:
    return [round(float(number), 4) for number in numbers]


def loss_rows(out: Path, model: str, folder: str = "loss") -> list[Row]:
    """Read the losses of a model's documents. Raises ValueError or FileNotFoundError if they are not there."""
    path = out / "evals" / model / folder / "cases.jsonl"
    return list(read_cases(path, "perplexity", by_context.check_row)[1].values())


def positions(rows: Sequence[Row]) -> list[int]:
    """Return the first position of each part, a power of two."""
    return [first for first in by_context.by_position(rows) if first >= FIRST]


def losses(rows: Sequence[Row]) -> list[Results]:
    """Return the loss by position, in nats per token."""
    table = []
    for first in positions(rows):
        loss = mean_loss(rows, str(first))
        of_bin = {"from": first, "nats": round(loss.nats, 4), "perplexity": round(loss.perplexity, 3)}
        interval = None if loss.interval is None else rounded(loss.interval)
        table.append(of_bin | {"interval": interval, "tokens": loss.tokens, "documents": loss.documents})
    return table


def differences(rows: Sequence[Row], base: Sequence[Row]) -> list[Results]:
    """Return by position how many nats the loss is above that of a base on the same documents, with a 95% interval over
    the documents. Raises ValueError for other documents."""
    of_base = {row["key"]: row for row in base}
    if [row["prompt_hash"] for row in rows] != [of_base[row["key"]]["prompt_hash"] for row in rows]:
        raise ValueError("two models were measured on other documents: remove OUT/evals, and repeat the command")
    table = []
    for first in positions(rows):
        pairs = [(row["sums"][str(first)], of_base[row["key"]]["sums"][str(first)]) for row in rows]
        nats = [own[0] - other[0] for own, other in pairs]
        tokens = [own[1] for own, _ in pairs]
        interval = rounded(bootstrap(nats, tokens)) if len(pairs) > 1 else None
        table.append({"from": first, "nats": round(sum(nats) / sum(tokens), 4), "interval": interval})
    return table


def record_of_part(out: Path, name: str) -> Path:
    """Return the file that a part of the study has when it ended."""
    return out / "parts" / f"{name}.json"


def measured(out: Path, part: str, models: Sequence[str]) -> list[str]:
    """Return those models whose part ended. The name of a model's part ends with its own."""
    return [model for model in models if record_of_part(out, f"{part}-{model}").exists()]


def loss_results(out: Path, plan: Plan, folder: str) -> Results:
    """Return the losses of the measured models, and their paired differences from the models before them."""
    rows = {model: loss_rows(out, model, folder) for model in measured(out, folder, plan.models)}
    compared = [(THETA, RELEASED)]
    for model in plan.trainings:
        compared += [(model, THETA), (model, RELEASED)]
    pairs = [(model, base) for model, base in compared if model in rows and base in rows]
    return {
        "losses": {model: losses(found) for model, found in rows.items()},
        "differences": {f"{model} - {base}": differences(rows[model], rows[base]) for model, base in pairs},
    }


SCORES: dict[str, Score] = {"ruler": ruler_score, "lines": lines_score}
"""Function that scores an answer, by evaluation."""


def task_results(out: Path, plan: Plan) -> list[Results]:
    """Return the scores of the tasks with answers, by task, length and model."""
    table = []
    for task in plan.tasks:
        check = row_checker(SCORES[task.evaluation])
        for model in measured(out, task.name, plan.task_models):
            path = out / "evals" / model / task.name / "cases.jsonl"
            rows = list(read_cases(path, task.evaluation, check)[1].values())
            for length, found in grouped(rows, "length").items():
                row = {"task": task.name, "length": length, "model": model, "cases": len(found)}
                table.append(row | {"score": round(mean(found), 4), "interval": rounded(score_interval(found))})
    return table


def short_task_results(out: Path, plan: Plan) -> list[Results]:
    """Return how many questions of the short task each model answers right."""
    table = []
    count = plan.short_questions
    for model in measured(out, continuations.NAME, plan.models):
        path = out / "evals" / model / continuations.NAME / "results.json"
        scores = json.loads(path.read_text())["results"][continuations.NAME]
        share = scores["acc,none"]
        row = {"model": model, "right": round(share * count), "questions": count}
        table.append(row | {"interval": rounded(wilson(share, count))})
    return table


def ring_step_results(out: Path) -> list[Results]:
    """Return the loss and the norm of the gradients of the step that rings of different sizes took."""
    table = []
    for ring in RINGS:
        if not record_of_part(out, f"ring-step-{ring}").exists():
            continue
        rows = read_metrics(out / "runs" / f"ring-{ring}" / "metrics.jsonl")
        (step,) = (row for row in rows if "loss" in row)
        table.append({"devices": ring, "loss": step["loss"], "grad_norm": step["grad_norm"]})
    return table


def chat_results(out: Path, models: Sequence[str]) -> list[Results]:
    """Return how many questions each model answers right, and those that it lost and won against the released one."""
    table: list[Results] = []
    right_before: set[str] = set()
    for model in measured(out, "chats", models):
        answers = chats.read_answers(out / "answers" / f"{model}.jsonl")
        pairs = zip(chats.QUESTIONS, answers, strict=True)
        right = {question.text for question, answer in pairs if chats.is_right(question, answer)}
        if model == RELEASED:
            right_before = right
        count = len(chats.QUESTIONS)
        row = {"model": model, "right": len(right), "questions": count}
        row |= {"interval": rounded(wilson(len(right) / count, count))}
        table.append(row | {"lost": sorted(right_before - right), "won": sorted(right - right_before)})
    return table


def training_results(out: Path, plan: Plan) -> list[Results]:
    """Return each run's stages: steps, losses, and the median of their seconds without the first, which compiles."""
    table = []
    for model in measured(out, "train", list(plan.trainings)):
        run = out / "runs" / model
        for stage in sorted(run.glob("stage-*")) or [run]:
            config = json.loads((stage / "config.json").read_text())
            steps = [row for row in read_metrics(stage / "metrics.jsonl") if "loss" in row]
            tokens = config["seq_len"] * config["batch_size"]
            seconds = [tokens / step["tokens_per_second"] for step in steps[1:]]
            row = {
                "model": model,
                "seq_len": config["seq_len"],
                "batch_size": config["batch_size"],
                "steps": len(steps),
                "loss_first": round(steps[0]["loss"], 4),
                "loss_last": round(steps[-1]["loss"], 4),
                "step_seconds": round(median(seconds), 3),
                "tokens_per_second": round(tokens / median(seconds), 1),
            }
            rates = {key: median(step[key] for step in steps[1:]) for key in ("mfu_palm",) if key in steps[0]}
            peaks = {"peak_memory_gib": steps[-1]["peak_memory_gib"]} if "peak_memory_gib" in steps[-1] else {}
            table.append(row | {key: round(value, 4) for key, value in (rates | peaks).items()})
    return table


def seconds_of_parts(out: Path) -> Results:
    """Return the seconds and CPU-seconds of the study's parts, by name."""
    parts = {path.stem: json.loads(path.read_text()) for path in (out / "parts").glob("*.json")}
    return {name: {key: parts[name][key] for key in ("seconds", "cpu_seconds")} for name in sorted(parts)}


def collect(out: Path, plan: Plan, machine: str, pending: Sequence[str]) -> Results:
    """Return the results of the parts that ended of one form of the study, and the names of those that are pending."""
    first, *others = plan.losses
    longer = {str(losses.context): loss_results(out, plan, loss_folder(plan, losses)) for losses in others}
    return {
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("jax", "flax", "numpy")} | {"python": platform.python_version()},
        "rope_theta": plan.rope_theta,
        "training": training_results(out, plan),
        **loss_results(out, plan, loss_folder(plan, first)),
        "tasks": task_results(out, plan),
        "chats": chat_results(out, plan.models),
        "longer": longer,
        "short_task": short_task_results(out, plan) if plan.short_questions else [],
        "ring_step": [] if plan.ring_step is None else ring_step_results(out),
        "parts": seconds_of_parts(out),
        "pending": list(pending),
    }


def write_results(path: Path, form: str, found: Results) -> bool:
    """Write the results of one form of the study into a file, whose other forms stay, and at its top the accelerator
    that one of them was measured on. Results that are complete are not replaced by some with pending parts. Returns
    whether they were written. Raises ValueError for a file that is not the study's."""
    content = json.loads(path.read_text()) if path.exists() else {"what": WHAT}
    if not isinstance(content, dict) or content.get("what") != WHAT:
        raise ValueError(f"{path} is not a file of this study: choose another --results")
    before = content.get(form)
    if found["pending"] and before is not None and not before.get("pending"):
        return False
    device = {"device": found["machine"]} if form == GPU_FORM else {}
    path.write_text(json.dumps(content | device | {form: found}, indent=1, ensure_ascii=False) + "\n")
    return True


def text(found: Results) -> str:
    """Return the results as a person reads them."""
    lines = _text_of_losses(found)
    for context, of_longer in found["longer"].items():
        lines += ["", f"documents of {int(context):,} tokens", *_text_of_losses(of_longer)]
    lines.append("")
    for row in found["tasks"]:
        low, high = row["interval"]
        lines.append(
            f"{row['task']} at {row['length']:,}, {row['model']}: {row['score']:.0%} of {row['cases']} "
            f"({low:.0%} to {high:.0%})"
        )
    for name, key in (("continuations of short passages", "short_task"), ("chats", "chats")):
        for row in found[key]:
            lines.append(f"{name}, {row['model']}: {row['right']} of {row['questions']} right")
    for row in found["ring_step"]:
        of_step = f"loss {row['loss']:.7f}, norm of the gradients {row['grad_norm']:.7f}"
        lines.append(f"a step on {row['devices']} devices: {of_step}")
    return "\n".join(lines)


def _text_of_losses(found: Results) -> list[str]:
    models = list(found["losses"])
    lines = ["loss by position, nats per token", f"{'from':>10}" + "".join(f"{model:>12}" for model in models)]
    for rows in zip(*found["losses"].values(), strict=True):
        lines.append(f"{rows[0]['from']:>10,}" + "".join(f"{row['nats']:>12.4f}" for row in rows))
    for name, rows in found["differences"].items():
        lines.append(f"\n{name}: nats, with 95% intervals over documents")
        for row in rows:
            interval = "" if row["interval"] is None else f"   {row['interval'][0]:+.4f} to {row['interval'][1]:+.4f}"
            lines.append(f"{row['from']:>10,}{row['nats']:>+12.4f}{interval}")
    return lines
