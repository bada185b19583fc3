"""Train the quickstart's model with float32 and with bfloat16 moments, and compare their held-out losses.

    python benchmarks/moment_dtypes.py                # 500 steps of three seeds: an hour of one core
    python benchmarks/moment_dtypes.py --steps=25     # quick, to see that it works

Runs are kept in --runs, and resumed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.estimate.workloads.targets import installed_version

DTYPES = ("float32", "bfloat16")
SEEDS = (0, 1, 2)


def command(dtype: str, seed: int, steps: int, run_dir: Path) -> list[str]:
    """The command of a run: the quickstart's first phase, at a context of 512, on one device."""
    changed = {
        "run_dir": run_dir,
        "seed": seed,
        "steps": steps,
        "seq_len": 512,
        "batch_size": 16,
        "mesh_dim": "1,1,1,1",
        "cpu_devices": 1,
        "checkpoint_minutes": 5,
        "optimizer.moment_dtype": dtype,
    }
    flags = [f"--config.{key}={value}" for key, value in changed.items()]
    return ["ringformer", "train", "--config=configs/quickstart.py", *flags]


def train(dtype: str, seed: int, steps: int, runs: Path) -> float:
    """Train one run and return its held-out loss, in nats a token."""
    run_dir = runs / f"{dtype}-{seed}-{steps}"
    line = command(dtype, seed, steps, run_dir)
    subprocess.run([sys.executable, "-m", *line], check=True)
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(row["eval_loss"] for row in reversed(rows) if "eval_loss" in row)


def compared(losses: dict[str, list[float]]) -> dict[str, Any]:
    """The bfloat16 losses relative to float32's of the same seeds, with the spread of the seeds."""
    above = [b / a - 1 for a, b in zip(losses["float32"], losses["bfloat16"], strict=True)]
    return {"above_float32": above, "mean": mean(above), "standard_deviation": stdev(above)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/moment_dtypes.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/moment_dtypes"))
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    losses: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for seed in SEEDS:
        for dtype in DTYPES:
            losses[dtype].append(train(dtype, seed, args.steps, args.runs))
    trained = []
    for seed in SEEDS:
        for dtype in DTYPES:
            trained.append(" ".join(command(dtype, seed, args.steps, Path("RUN"))))
    content = {
        "what": "measured: held-out loss, nats a token, of the quickstart's model with moments of either dtype",
        "command": "python benchmarks/moment_dtypes.py",
        "runs": trained,
        **made(),
        "versions": {name: installed_version(name) for name in ("jax", "jaxlib", "optax")},
        "steps": args.steps,
        "seeds": SEEDS,
        "eval_loss": losses,
        **compared(losses),
    }
    write_results(args.out, content)


if __name__ == "__main__":
    main()
