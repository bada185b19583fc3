"""Train the quickstart's model with float32 and with bfloat16 moments, and compare their held-out losses.

    python benchmarks/moment_dtypes.py                # 500 steps of three seeds: an hour of one core
    python benchmarks/moment_dtypes.py --steps=25     # quick, to see that it works

Runs are kept in --runs, and resumed.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.quickstart_losses import SEEDS, above, config_flags, last_eval_loss, origin
from benchmarks.result_files import write_results
from ringformer.cli.parser import output_argument

DTYPES = ("float32", "bfloat16")


def command(dtype: str, seed: int, steps: int, run_dir: Path) -> list[str]:
    """The command of a run: the quickstart's first phase, at a context of 512, on one device."""
    changed = {
        "run_dir": run_dir,
        "seed": seed,
        "steps": steps,
        "seq_len": 512,
        "batch_size": 16,
        "checkpoint_minutes": 5,
        "optimizer.moment_dtype": dtype,
    }
    return ["ringformer", "train", "--config=configs/quickstart.py", *config_flags(changed)]


def train(dtype: str, seed: int, steps: int, runs: Path) -> float:
    """Train one run and return its held-out loss, in nats a token."""
    run_dir = runs / f"{dtype}-{seed}-{steps}"
    line = command(dtype, seed, steps, run_dir)
    subprocess.run([sys.executable, "-m", *line], check=True)
    return last_eval_loss(run_dir)


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
        **origin(args.steps),
        "eval_loss": losses,
        **above(losses["float32"], losses["bfloat16"]),
    }
    write_results(args.out, content)


if __name__ == "__main__":
    main()
