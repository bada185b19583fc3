"""The outputs of a report: Markdown, JSON and a figure."""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringformer.evals.evaluation_setup import out_folder, say
from ringformer.evals.figures import COLOR, PERCENT
from ringformer.evals.model_folder import identity, is_hugging_face
from ringformer.evals.report.gather import NATS, SCORE, Line, gather
from ringformer.files.atomic import write_whole
from ringformer.files.output_place import check_output
from ringformer.files.run_layout import CASES, CONFIG, EVALS, REPORT, RESULTS
from ringformer.plotting import RULE, check_matplotlib, drawn

HEAD = ("evaluation", "task", "context", "cases", "value", "95% interval", "unit")
Rows = Sequence[Sequence[str]]


def report(args: argparse.Namespace) -> None:
    """Run `ringformer eval report`.

    Raises ValueError for a model without evaluations of its checkpoint, and FileNotFoundError for no model.
    """
    run = Path(args.run_dir)
    if is_hugging_face(args.run_dir) and not (args.evals and args.out):
        raise ValueError(f"{run} is a Hugging Face checkpoint, which is never written to: set --evals and --out")
    if not (run / CONFIG).is_file():
        stages = ", ".join(path.name for path in sorted(run.glob("stage-*")))
        which = "no folder of a run or of a model"
        if stages:
            which = f"a run in stages: name one of them, {stages}"
        raise ValueError(f"{run} is {which}")
    if args.out is not None and any((check_output(args.out, "--out") / file).exists() for file in (CASES, RESULTS)):
        raise ValueError(f"--out={args.out} is the folder of an evaluation: choose another")
    check_matplotlib()
    of_model = identity(args.run_dir)
    evals = Path(args.evals or run / EVALS)
    gathered = gather(evals, of_model)
    for name, reason in gathered.left_out.items():
        say(f"{evals / name} is left out: {reason}")
    if not gathered.lines:
        raise ValueError(f"{evals} has no evaluation of the checkpoint of {run}: run ringformer eval first")
    title = f"{run.resolve().name}, step {of_model['step'] or 0}"
    table = markdown(gathered.lines)
    files = "report.md", "report.json", "report.png"
    with out_folder(argparse.Namespace(out=args.out, run=args.run_dir), REPORT, files) as folder:
        content = {"model": of_model, "lines": [line._asdict() for line in gathered.lines]}
        write_whole(folder / "report.json", json.dumps(content, indent=1) + "\n")
        write_whole(folder / "report.md", f"# {title}\n\n{table}\n")
        draw_report(gathered.lines, title, path=folder / "report.png")
    print(table)
    say(f"{folder}: {', '.join(files)}")


def markdown(lines: Sequence[Line]) -> str:
    """Return a table in Markdown, whose columns are aligned for those who read it as text."""
    rows = list(map(cells, lines))
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    rule = tuple("-" * width for width in widths)
    text = []
    for row in (HEAD, rule, *rows):
        padded = map(str.ljust, row, widths)
        text.append(f"| {' | '.join(padded)} |")
    return "\n".join(text)


def cells(line: Line) -> tuple[str, ...]:
    """Return the cells of a line; a score is in percent, a loss has its perplexity."""
    name = line.task.replace("|", "\\|")
    number = ".1%" if line.unit == SCORE else ".4f"
    value = f"{line.value:{number}}"
    interval = ""
    if line.interval is not None:
        low, high = line.interval
        interval = f"{low:{number}} to {high:{number}}"
    unit = line.unit
    if unit == NATS:
        unit = f"{NATS}, perplexity {math.exp(min(line.value, 700)):,.3f}"
    return line.evaluation, name, _count(line.context), _count(line.cases), value, interval, unit


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


@drawn
def draw_report(plt, lines: Sequence[Line], title: str) -> Any:
    """Plot each value with its interval, in a panel for each unit."""
    by_unit = defaultdict(list)
    for line in sorted(lines, key=lambda line: (line.unit != SCORE, line.unit)):
        by_unit[line.unit].append(line)
    heights = [len(of_unit) + 1.5 for of_unit in by_unit.values()]
    size = (8, 0.24 * sum(heights) + 0.8)
    figure, panels = plt.subplots(
        len(by_unit), 1, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    for axes, (unit, of_unit) in zip(panels[:, 0], by_unit.items(), strict=True):
        names = []
        for place, line in enumerate(of_unit):
            low, high = line.interval or (line.value, line.value)
            axes.plot([low, high], [place, place], color=COLOR, linewidth=1.5, alpha=0.5)
            axes.plot([line.value], [place], "o", color=COLOR, markersize=5)
            parts = filter(None, (line.evaluation, line.task, _count(line.context)))
            names.append(", ".join(dict.fromkeys(parts)))
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        axes.set_xlabel(f"{unit}, 95% interval")
        if unit == SCORE:
            axes.set_xlim(-0.02, 1.02)
            axes.xaxis.set_major_formatter(PERCENT)
    panels[0, 0].set_title(title)
    return figure
