"""Write the results of experiments/experience.sh, and draw the returns by the number of episodes in the context.

python experiments/experience_results.py FOLDER --results=FILE --figure=FILE --measured_on=... --command=...
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.evals.figures import CURVE, PERCENT
from ringformer.evals.intervals import bootstrap, wilson
from ringformer.evals.model_folder import identity
from ringformer.files.hashes import hash_file
from ringformer.files.untrusted import read_object
from ringformer.plotting import FAINT, INK, RULE, check_matplotlib, drawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.dark_room import Cell, optimal, walk

PLAYED = {
    "run": (1, 4, 16, 32, 128),
    "run-blank": (16, 32),
    "run-other": (16, 32),
    "run-shuffled": (16, 32),
    "short": (1, 4, 16, 32),
}
"""Numbers of episodes that a script with controls plays, by model and control."""
PAIRS = (("run", 32, "run", 16), ("run", 128, "run", 32), *(("run-shuffled", n, "run", n) for n in (16, 32)))
"""Comparisons over the same cases."""

Episodes = dict[tuple[int, str, int], list[dict[str, Any]]]
"""Episodes by (seed, model and control, number of episodes)."""


MODELS = {"run": "run/stage-3-*", "short": "run/stage-1-*", "one-device": "one-device/stage-3-*"}
"""Folders of the models in the folder of a seed."""


def stage(folder: Path, seed: int, model: str) -> Path:
    """Return the folder of a seed's model."""
    found = sorted((folder / f"seed-{seed}").glob(MODELS[model]))
    if not found:
        raise ValueError(f"{folder}/seed-{seed} has no {MODELS[model]}: run bash experiments/experience.sh first")
    return found[0]


def read(folder: Path) -> Episodes:
    """Read the episodes of every seed; raises ValueError for those of another seed, control or checkpoint than their
    place says."""
    found: Episodes = {}
    for path in sorted(folder.glob("seed-*/episodes/*.json")):
        content = read_object(path.parent, path.name, "remove it")
        seed, (model, _, control) = int(path.parts[-3].removeprefix("seed-")), path.stem.partition("-")
        if path.stem not in PLAYED:
            raise ValueError(f"{path} is no file of experiments/experience.sh: remove it")
        if (content.get("seed"), content.get("control")) != (seed, control):
            raise ValueError(f"{path} has episodes of another seed or control than its name says: remove it")
        if content.get("checkpoint") != identity(stage(folder, seed, model))["checkpoint"]:
            raise ValueError(f"{path} has episodes of another checkpoint than its run: remove it")
        for n, rows in content["episodes"].items():
            found[seed, path.stem, int(n)] = rows
    return found


def shares(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the return of each episode over the optimal one."""
    return np.array([row["return"] / optimal(Cell.parse(row["goal"])) for row in rows])


def reaches(actions: str, cell: Cell) -> bool:
    """Tell whether an episode reaches a cell."""
    return any(reached == cell for _, reached in walk(actions))


def interval(values: np.ndarray, groups: Sequence[Any] | None = None) -> list[float]:
    """Return the 95% interval of a mean, by a bootstrap over episodes or over their groups."""
    by_group: dict[Any, list[float]] = {}
    for value, group in zip(values, range(len(values)) if groups is None else groups, strict=True):
        by_group.setdefault(group, []).append(float(value))
    ends = bootstrap(
        [sum(of_group) for of_group in by_group.values()], [len(of_group) for of_group in by_group.values()]
    )
    return [round(end, 4) for end in ends]


def share_interval(values: np.ndarray, groups: Sequence[Any] | None = None) -> list[float]:
    """Return the `interval` of a mean share. If all values are equal, a bootstrap has no width, and the result is
    Wilson's interval of as many cases as there are groups."""
    if len(set(values)) == 1:
        return [round(end, 4) for end in wilson(values[0], len(values if groups is None else set(groups)))]
    return interval(values, groups)


def summary(episodes: Episodes) -> list[dict[str, Any]]:
    """Return a row for each model, control and number of episodes, pooled over the seeds."""
    table = []
    for name, n in sorted({key[1:] for key in episodes}, key=lambda key: (list(PLAYED).index(key[0]), key[1])):
        by_seed = {seed: rows for (seed, *of), rows in sorted(episodes.items()) if of == [name, n]}
        rows = [row for of_seed in by_seed.values() for row in of_seed]
        by_goal = [(seed, row["goal"]) for seed, of_seed in by_seed.items() for row in of_seed]
        values = shares(rows)
        entry = {
            "model": name,
            "n": n,
            "episodes": len(rows),
            "return": round(values.mean(), 4),
            "interval": share_interval(values),
            "interval_over_goals": share_interval(values, by_goal),
            "goal_in_context": round(float(np.mean([row["shown"] for row in rows])), 4),
            "by_seed": {seed: round(shares(of_seed).mean(), 4) for seed, of_seed in by_seed.items()},
        }
        if "starred" in rows[0]:
            for cell in ("starred", "goal"):
                reached = np.array([float(reaches(row["actions"], Cell.parse(row[cell]))) for row in rows])
                entry |= {f"reached_{cell}": round(reached.mean(), 4), f"interval_of_{cell}": share_interval(reached)}
        table.append(entry)
    return table


def comparisons(episodes: Episodes) -> list[dict[str, Any]]:
    """Return the differences of paired cases, with bootstraps over the pairs and over their goals."""
    table = []
    for name, n, base, base_n in PAIRS:
        differences, by_goal = [], []
        for seed in sorted({key[0] for key in episodes}):
            rows, others = episodes.get((seed, name, n)), episodes.get((seed, base, base_n))
            if rows and others:
                number = min(len(rows), len(others))
                rows, others = rows[:number], others[:number]
                if [row["goal"] for row in rows] != [row["goal"] for row in others]:
                    raise ValueError(f"seed {seed}: episodes of {name} and {base} have other goals: play both again")
                differences += list(shares(rows) - shares(others))
                by_goal += [(seed, row["goal"]) for row in rows]
        if differences:
            found = np.array(differences)
            entry = {"of": f"{name}, n = {n}", "over": f"{base}, n = {base_n}", "pairs": len(found)}
            entry |= {"difference": round(found.mean(), 4), "interval": interval(found)}
            table.append(entry | {"interval_over_goals": interval(found, by_goal)})
    return table


def columns(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return episodes as texts, one word for each episode."""
    texts = {key: " ".join(str(row[key]) for row in rows) for key in rows[0] if key != "shown"}
    return {"shown": "".join("01"[row["shown"]] for row in rows)} | texts


def one_device(folder: Path, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return how much training on one device differs, by seed; raises ValueError if a file is of other checkpoints than
    the runs have."""
    differences = {}
    for seed in seeds:
        path = folder / f"seed-{seed}" / "one-device.json"
        if path.is_file():
            found = read_object(path.parent, path.name, "remove it")
            runs = [stage(folder, seed, run) for run in ("run", "one-device")]
            if found["checkpoints"] != [identity(run)["checkpoint"] for run in runs]:
                raise ValueError(f"{path} is of other checkpoints than the runs: remove it")
            differences[seed] = found
    return differences


def stages(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Return the stages that a seed's model was trained in."""
    path = folder / f"seed-{seed}" / "run" / "stages.json"
    keys = ("seq_len", "rope_theta", "steps", "tokens", "state")
    return [{key: row[key] for key in keys} for row in json.loads(path.read_text())] if path.is_file() else []


def seconds(folder: Path) -> dict[str, dict[str, int]]:
    """Return the seconds of the script's parts by seed. A part that was interrupted is not counted; one that was run
    again is counted each time."""
    found: dict[str, dict[str, int]] = {}
    path = folder / "seconds.txt"
    for line in path.read_text().splitlines() if path.is_file() else ():
        seed, part, count = line.split()
        of_seed = found.setdefault(seed, {})
        of_seed[part] = of_seed.get(part, 0) + int(count)
    return found


def chains(folder: Path, seed: int) -> dict[str, Any]:
    """Return the settings and the hash of a seed's chains."""
    of_seed = folder / f"seed-{seed}"
    return {**read_object(of_seed, "made.json"), "hash": hash_file(of_seed / "chains.jsonl")}


COLORS = {"run": "#3b75af", "short": "#c2570c", "run-blank": FAINT, "run-other": "#2c8a57"}
NAMES = {
    "run": "trained on up to 128 episodes",
    "short": "trained on 4 episodes alone (stage 1)",
    "run-blank": "context without stars",
    "run-other": "stars of another goal: return",
}


@drawn
def draw(plt, table: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw the returns by the number of episodes, with their intervals and the share of contexts with the goal."""
    figure, axes = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    main = [row for row in table if row["model"] == "run"]
    axes.plot(
        [row["n"] for row in main],
        [row["goal_in_context"] for row in main],
        "--",
        color=INK,
        label="contexts that show the goal",
        **CURVE | {"linewidth": 1},
    )
    for model, name in NAMES.items():
        rows = [row for row in table if row["model"] == model]
        if rows:
            y, (low, high) = (
                np.array([row["return"] for row in rows]),
                np.transpose([row["interval_over_goals"] for row in rows]),
            )
            errors, line = np.maximum((y - low, high - y), 0), "o" if "-" in model else "o-"
            x = [row["n"] * (1.06 if model == "run-other" else 1) for row in rows]
            axes.errorbar(x, y, errors, fmt=line, color=COLORS[model], elinewidth=1, capsize=2, label=name, **CURVE)
            if model == "run-other":
                reached = [row["reached_starred"] for row in rows]
                label = "stars of another goal: episodes that reach it"
                axes.plot(x, reached, "D", color="none", markeredgecolor=COLORS[model], label=label, **CURVE)
    ticks = PLAYED["run"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set(
        ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1], xlabel="n: the episode played, and n - 1 explorations before it"
    )
    axes.set(ylabel="return over the optimal, 95% interval over goals", title=title)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.tick_params(length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of experiments/experience.sh")
    parser.add_argument("--results", type=output_argument, required=True)
    parser.add_argument("--figure", type=output_argument, required=True)
    parser.add_argument("--command", required=True, help="command that made the folder")
    parser.add_argument("--measured_on", required=True, help="description of the machine")
    args = parser.parse_args()
    try:
        check_matplotlib()
        episodes = read(args.folder)
        if not episodes:
            raise ValueError(f"{args.folder} has no episodes: run bash experiments/experience.sh first")
        table = summary(episodes)
        seeds = sorted({key[0] for key in episodes})
        content = {
            "what": "measured: return over the optimal one in a dark room with goals that no model was trained on",
            "measured_on": args.measured_on,
            **made(),
            "command": args.command,
            "chains": {seed: chains(args.folder, seed) for seed in seeds},
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("jax", "flax", "optax")},
            },
            "seconds": seconds(args.folder),
            "stages": {seed: stages(args.folder, seed) for seed in seeds},
            "summary": table,
            "comparisons": comparisons(episodes),
            "ring_over_one_device": one_device(args.folder, seeds),
            "episodes": {
                f"seed {seed}": {
                    f"{name}, n = {n}": columns(rows) for (of, name, n), rows in episodes.items() if of == seed
                }
                for seed in seeds
            },
        }
        write_results(args.results, content)
        count = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        draw(table, f"returns for goals never trained on, 0.1M parameters, {count}", path=args.figure)
    except (ValueError, OSError, KeyError, TypeError) as error:
        print(f"experiments/experience_results.py: {error}", file=sys.stderr)
        sys.exit(2)
    for row in table:
        low, high = row["interval"]
        print(
            f"{row['model']:<13} n = {row['n']:<4} {row['return']:.3f} ({low:.3f} to {high:.3f}), "
            f"{row['episodes']} episodes, {row['goal_in_context']:.3f} of the contexts show the goal"
        )
    for row in content["comparisons"]:
        low, high = row["interval"]
        print(
            f"{row['of']} over {row['over']}: {row['difference']:+.3f} ({low:+.3f} to {high:+.3f}), "
            f"{row['pairs']} pairs"
        )
    print(f"{args.results} and {args.figure}")


if __name__ == "__main__":
    main()
