"""Train the quickstart's model with float32 weights, with bfloat16 weights, and with bfloat16 weights that are rounded
to nearest, as a control; compare their held-out losses.

    python benchmarks/params_dtypes.py                # 500 steps of three seeds
    python benchmarks/params_dtypes.py --steps=25     # quick, to see that it works

Runs are kept in --runs, and resumed. benchmarks/larger_models.py compiles a step with such weights.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

from benchmarks.quickstart_losses import SEEDS, above, config_flags, last_eval_loss, origin
from benchmarks.result_files import write_results
from ringformer.cli.parser import output_argument
from ringformer.parallel.mesh import simulate_cpu_devices
from ringformer.runs.config_file import load_config, parse
from ringformer.train import update
from ringformer.train.loop import train
from ringformer.train.prepare import prepare

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "nearest": "bfloat16"}
"""Dtype of the weights by the name of a run; those of "nearest" are bfloat16, rounded to nearest."""


def flags(name: str, seed: int, steps: int, run_dir: Path) -> list[str]:
    """The flags of a run: the quickstart's model on one device, at a short context and the default learning rate."""
    changed = {
        "run_dir": run_dir,
        "seed": seed,
        "steps": steps,
        "seq_len": 256,
        "batch_size": 4,
        "eval_batches": 64,
        "optimizer.learning_rate": 3e-4,
        "optimizer.params_dtype": DTYPES[name],
    }
    return config_flags(changed)


def train_here(name: str, overrides: list[str]) -> None:
    """Train one run in this process."""
    if name == "nearest":
        update.round_stochastically = lambda x, key, beside: x.astype(jnp.bfloat16)
    simulate_cpu_devices(1)
    train(prepare(parse(load_config("configs/quickstart.py", overrides))))


def eval_loss(name: str, seed: int, steps: int, runs: Path) -> float:
    """Train one run in a process of its own, and return its held-out loss in nats a token."""
    run_dir = runs / f"{name}-{seed}-{steps}"
    line = [sys.executable, "-m", "benchmarks.params_dtypes", f"--only={name}", *flags(name, seed, steps, run_dir)]
    subprocess.run(line, check=True)
    return last_eval_loss(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/params_dtypes.json")
    parser.add_argument("--runs", type=Path, default=Path("runs/params_dtypes"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", choices=DTYPES, help="train one run, whose flags follow, and write no results")
    args, overrides = parser.parse_known_args()
    if args.only:
        train_here(args.only, overrides)
        return
    losses: dict[str, list[float]] = {name: [] for name in DTYPES}
    trained = []
    for seed in SEEDS:
        for name in DTYPES:
            losses[name].append(eval_loss(name, seed, args.steps, args.runs))
            if name != "nearest":
                words = flags(name, seed, args.steps, Path("RUN"))
                trained.append(" ".join(["ringformer train --config=configs/quickstart.py", *words]))
    content = {
        "what": "measured: held-out loss, nats a token, of the quickstart's model with weights of either dtype; "
        "nearest: with bfloat16 weights that are rounded to nearest, as no run of ringformer is",
        "command": "python benchmarks/params_dtypes.py",
        "runs": trained,
        **origin(args.steps),
        "eval_loss": losses,
        "bfloat16": above(losses["float32"], losses["bfloat16"]),
        "nearest": above(losses["float32"], losses["nearest"]),
    }
    write_results(args.out, content)


if __name__ == "__main__":
    main()
