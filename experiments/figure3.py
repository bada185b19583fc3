"""Write the results of experiments/figure3.sh, and draw them beside the paper's Figure 3.

python experiments/figure3.py FOLDER --results=results/figure3.json --figure=docs/figures/figure3.png --measured_on=...
python experiments/figure3.py done FOLDER/NAME STAGE
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.data import TokenStore
from ringformer.evals.case_file import Row, read_cases
from ringformer.evals.figures import CURVE, PERCENT
from ringformer.evals.lines import score
from ringformer.evals.model_folder import identity
from ringformer.evals.runner import row_checker
from ringformer.evals.tables import accuracy_interval, contexts, grouped, mean, mean_tokens
from ringformer.plotting import FAINT, INK, RULE, drawn
from ringformer.runs.metrics import read_metrics

K = 1024
MODELS = {4: K, 5: 4 * K, 6: 8 * K, 7: 16 * K, 8: 32 * K}
"""Context of the models by the stage that ends with them."""
LONGEST = 64 * K
"""Longest context of an evaluation."""
EVALUATIONS = ("figure3", "figure3_documents")
"""Folders of the evaluations of a stage: up to 8K tokens with a document for each question, beyond with twenty
questions about each document."""
BINS = 5
"""Parts of a record by which accuracy is listed."""


class Run(NamedTuple):
    """A training run of the family."""

    seed: int
    devices: int = 8
    """Devices of the ring."""
    last: int = 8
    """Last stage."""
    farthest: int = 1
    """Contexts to evaluate, relative to the one that the model was trained at."""
    path: str | None = None
    """Its folder; None: run, in the folder of its name."""


RUNS = {
    "seed-0": Run(0, farthest=4),
    "seed-1": Run(1),
    "seed-2": Run(2),
    "control": Run(0, devices=1, last=6, path="seed-0/control"),
}
"""Runs by name. The first is evaluated from 1K to four times its own context."""

PAPER = {
    "Ring Attention-13B-512K": {4_000: 0.9, 500_000: 0.9},
    "GPT3.5-turbo-16K": {4_000: 1.0, 16_000: 1.0},
    "Vicuna-13B-16K": {4_000: 1.0, 12_000: 0.6},
    "Claude-2-100K": {4_000: 1.0, 64_000: 1.0, 100_000: 0.9},
}
"""Accuracy by tokens at the ends and bends of the curves of the paper's Figure 3, as a written summary of it gives
them, to about 0.05. The paper prints no numbers."""


def wanted(run: Run, context: int) -> list[int]:
    """Return the contexts at which the model of a run is evaluated."""
    if run.farthest == 1:
        return [context]
    return [K << i for i in range(7) if K << i <= min(run.farthest * context, LONGEST)]


def seconds_of_steps(run_dir: Path, tokens: int) -> float:
    """Return the seconds of the steps of a stage, with compilation. `tokens` are those of a step."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return round(sum(tokens / row["tokens_per_second"] for row in rows if "tokens_per_second" in row), 1)


def longest_record(store: Path, stage: dict[str, Any], run_dir: Path) -> int:
    """Return a length in tokens that a record which the stage trained on certainly reached.

    A sequence has a record or more, none is read twice before all were read, and records that were not read may be the
    longest. With as many records read as there are, this is the length of the longest.
    """
    data = json.loads((run_dir / "config.json").read_text())["data"]
    lengths = np.diff(TokenStore(store / "train").offsets)
    lengths = np.sort(lengths[(lengths >= data["min_length"]) & (lengths <= data["max_length"])])
    read = min(len(lengths), stage["tokens"] // stage["seq_len"])
    return int(lengths[read - 1])


def depth_bins(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return cases and accuracy by the part of the record that has the line asked for, from its begin to its end."""
    bins = []
    for i in range(BINS):
        found = [row for row in rows if BINS * row["position"] // row["num_lines"] == i]
        accuracy = round(mean(found), 4) if found else None
        bins.append({"from": i / BINS, "to": (i + 1) / BINS, "cases": len(found), "accuracy": accuracy})
    return bins


def measured(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the accuracy by context."""
    return [
        {
            "context": context,
            "prompt_tokens": round(mean_tokens(found)),
            "lines": max(row["num_lines"] for row in found),
            "documents": len(grouped(found, "index")),
            "cases": len(found),
            "accuracy": round(mean(found), 4),
            "interval": [round(end, 4) for end in accuracy_interval(found)],
            "depths": depth_bins(found),
        }
        for context, found in contexts(rows).items()
    ]


def curve(run_dir: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the seed of the cases and the accuracy by context of the model of a stage, as far as it was evaluated.

    Raises ValueError for cases of another checkpoint, or that were changed.
    """
    seed, rows = None, []
    for name in EVALUATIONS:
        path = run_dir / "evals" / name / "cases.jsonl"
        settings, found = read_cases(path, "lines", row_checker(score)) if path.is_file() else (None, {})
        if settings is None:
            continue
        if settings["checkpoint"] != identity(run_dir)["checkpoint"]:
            raise ValueError(f"{path} has the cases of another checkpoint than {run_dir} has: remove {path.parent}")
        seed = settings["seed"]
        rows += measured(list(found.values())) if found else []
    return seed, sorted(rows, key=lambda row: row["context"])


def collect(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the runs with their stages and curves, and what is missing of the family."""
    runs, missing = [], []
    for name, run in RUNS.items():
        run_path = folder / (run.path or f"{name}/run")
        path = run_path / "stages.json"
        trained = {row["stage"]: row for row in json.loads(path.read_text())} if path.is_file() else {}
        found: dict[str, Any] = {"name": name, "seed": run.seed, "ring": run.devices, "stages": [], "curves": []}
        for stage in trained.values():
            run_dir = run_path / stage["run_dir"]
            if stage["state"] != "finished":
                continue
            kept = {key: stage[key] for key in ("stage", "seq_len", "rope_theta", "steps", "tokens")}
            kept["longest_record"] = longest_record(run_path.parent / "store", stage, run_dir)
            kept["seconds"] = seconds_of_steps(run_dir, stage["tokens"] // stage["steps"])
            found["stages"].append(kept)
        finished = {stage["stage"]: stage for stage in found["stages"]}
        for number, context in MODELS.items():
            if number > run.last:
                break
            if number not in finished:
                missing.append(f"{name}: training at {context // K}K")
                continue
            seed, rows = curve(run_path / trained[number]["run_dir"])
            own = [row["prompt_tokens"] for row in rows if row["context"] == context]
            if own and own[0] > (longest := finished[number]["longest_record"]):
                raise ValueError(
                    f"{name}: stage {number} is certain to have trained on records of {longest:,} tokens only, fewer "
                    f"than the {own[0]:,} of a case: raise its steps in configs/retrieval.py"
                )
            counts = {row["context"]: row["cases"] for row in rows}
            complete = [length for length in wanted(run, context) if counts.get(length, 0) >= 200]
            missing += [
                f"{name}: the model trained at {context // K}K, evaluated at {length // K}K"
                for length in wanted(run, context)
                if length not in complete
            ]
            if rows:
                found["curves"].append({"trained": context, "cases_seed": seed, "accuracy": rows})
        if found["stages"]:
            runs.append(found)
    return runs, missing


def evaluation_seconds(folder: Path) -> dict[str, int]:
    """Return the seconds of the evaluations by run and stage, with all their interruptions' starts."""
    seconds: dict[str, int] = {}
    path = folder / "evaluation_seconds.txt"
    for line in path.read_text().splitlines() if path.is_file() else ():
        name, count = line.rsplit(" ", 1)
        seconds[name] = seconds.get(name, 0) + int(count)
    return seconds


COLORS = ("#9db8d2", "#3b75af", "#2c8a57", "#c2570c", "#a06cc0")


@drawn
def draw(plt, runs: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw our curves beside what the paper's figure shows."""
    figure, (ours, papers) = plt.subplots(
        1, 2, figsize=(11, 4.9), layout="constrained", width_ratios=(3, 2), sharey=True
    )
    colors = dict(zip(MODELS.values(), COLORS, strict=True))
    for curve_ in runs[0]["curves"]:
        rows, color = curve_["accuracy"], colors[curve_["trained"]]
        x, y = [row["context"] for row in rows], np.array([row["accuracy"] for row in rows])
        low, high = np.transpose([row["interval"] for row in rows])
        name = f"trained at {curve_['trained'] // K}K"
        errors = np.maximum((y - low, high - y), 0)
        ours.errorbar(x, y, errors, color=color, marker="o", elinewidth=1, capsize=2, label=name, **CURVE)
    for mark, shift, run in zip("sDx", (0.93, 0.87, 1.08), runs[1:], strict=False):  # beside one another
        places = [(shift * c["trained"], row["accuracy"]) for c in run["curves"] for row in c["accuracy"]]
        if places:
            name = f"seed {run['seed']}{', without a ring' if run['ring'] == 1 else ''}, at its own context"
            style = {"color": INK if mark == "x" else "none", "markeredgecolor": INK, "markersize": 5, "zorder": 4}
            ours.plot(*np.transpose(places), mark, label=name, clip_on=False, **style)
    for color, (name, points) in zip(("#3b75af", FAINT, "#c2570c", "#2c8a57"), PAPER.items(), strict=True):
        papers.plot(list(points), list(points.values()), "o--", color=color, label=name, **CURVE)
    for axes, low, high in ((ours, K, LONGEST), (papers, 2 * K, 512 * K)):
        ticks = [2**i for i in range(int(np.log2(low)), int(np.log2(high)) + 1)]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick // K}K" for tick in ticks])
        axes.set_xlim(low / 1.25, high * 1.25)
        axes.minorticks_off()
        axes.set(ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1], xlabel="tokens of the context")
        axes.yaxis.set_major_formatter(PERCENT)
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.tick_params(length=0)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    ours.set(ylabel="accuracy, 95% interval", title=title)
    papers.set_title("the paper's Figure 3, approximate")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of experiments/figure3.sh")
    parser.add_argument("--results", type=output_argument, required=True)
    parser.add_argument("--figure", type=output_argument, required=True)
    parser.add_argument("--measured_on", required=True, help="description of the machine")
    args = parser.parse_args()
    try:
        runs, missing = collect(args.folder)
        if not runs:
            raise ValueError(f"{args.folder} has no finished stage: run bash experiments/figure3.sh first")
        content = {
            "what": "measured: line retrieval of a small model by the context it was trained at, the paper's Figure 3",
            "measured_on": args.measured_on,
            **made(),
            "commands": ["bash experiments/figure3.sh"],
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("jax", "flax", "optax")},
            },
            "form": "numbers 1 to 99, not LongEval's",
            "missing": missing,
            "evaluation_seconds": evaluation_seconds(args.folder),
            "runs": runs,
        }
        write_results(args.results, content)
        draw(runs, "line retrieval, 0.2M parameters" + (" (partial)" if missing else ""), path=args.figure)
    except (ValueError, OSError, KeyError) as error:
        print(f"experiments/figure3.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.results} and {args.figure}" + (f"; missing: {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
