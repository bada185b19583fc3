"""Main part of the quickstart: train, compare the kinds of attention, plot, summarise, and continue a prompt."""

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from jax.sharding import NamedSharding

from ringformer.checkpoints.saved_model import restore_params
from ringformer.cli.command_line import run as run_command
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh, simulate_cpu_devices
from ringformer.parallel.parameters import weight_shardings
from ringformer.runs.config import Config
from ringformer.runs.config_file import load_config, parse
from ringformer.train.loop import train
from ringformer.train.prepare import Run, prepare
from ringformer.train.step import make_eval_step, make_logits

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTINUE = ["generate", "--prompt=self.", "--temperature=1"]
"""Sampling at the model's own probabilities (temperature 1).

In the standard library most spaces are followed by a space. At lower temperatures, a model of this size seldom leaves
an indentation again. In 200 texts, the median share of visible characters is 70% and the minimum 42%. After the first
line of a function, at a temperature of 0.5, the median is 6% and the minimum 0%."""
LONGEST = 240  # tokens in the continuation


def short_context(config: Config) -> Config:
    """Return the config of the first stage: as many tokens per step, in sequences an eighth as long."""
    optimizer = replace(config.optimizer, learning_rate=6e-3)
    return replace(
        config,
        run_dir=f"{config.run_dir}/short_context",
        seq_len=config.seq_len // 8,
        batch_size=config.batch_size * 8,
        steps=2 * config.steps,
        optimizer=optimizer,
    )


def compare_attention(run: Run) -> float:
    """Compare ring, blockwise and vanilla attention on a held-out batch; return the largest relative error of the loss
    and the logits."""
    c = run.config
    model: Any = c.model
    natural = replace(model, layout="contiguous")
    assert run.eval_data is not None, "the quickstart holds out documents"
    batch = run.eval_data.read(0)
    order = permutation(c.model.layout, c.seq_len, run.program.mesh.shape["sp"])
    results = {}
    for kind, mesh_dim in (("ring", c.mesh_dim), ("blockwise", "1,1,1,1"), ("vanilla", "1,1,1,1")):
        one = kind != "ring"
        mesh = make_mesh(mesh_dim, jax.devices()[:1] if one else None)
        config = replace(natural if one else model, attention=kind)
        weights = weight_shardings(config, mesh)
        # The batch has the ring's layout; one device needs it in natural order.
        rows = jax.tree.map(lambda x, one=one: x[:, np.argsort(order)] if one else x, batch)
        rows = jax.device_put(rows, NamedSharding(mesh, BATCH))
        shards = restore_params(run.run_dir, weights, mesh)
        nats, tokens = make_eval_step(config, weights, mesh, seq_len=c.seq_len)(shards, rows)
        logits = np.asarray(make_logits(config, weights, mesh)(shards, rows))
        results[kind] = float(nats.sum() / tokens.sum()), logits if one else logits[:, np.argsort(order)]
    loss, logits = results["vanilla"]
    worst = {}
    for kind in ("ring", "blockwise"):
        distance = np.linalg.norm(results[kind][1] - logits) / np.linalg.norm(logits)
        errors = abs(results[kind][0] / loss - 1), float(distance)
        worst[kind] = max(errors)
        print(
            f"  {kind:9s} loss {results[kind][0]:.6f} (vanilla {loss:.6f})  relative error of loss {errors[0]:.1e}, "
            f"of logits {errors[1]:.1e}"
        )
    return worst["ring"]


def continue_prompt(run: Run) -> None:
    """Print a command that continues a prompt with the trained model, and its output."""
    tokens = min(LONGEST, run.config.seq_len // 2)
    command = [*CONTINUE, f"--max_new_tokens={tokens}", f"--run={run.run_dir}"]
    print(f"\n$ {shlex.join(['.venv/bin/ringformer', *command])}")
    run_command(command)


def plot(stages: list[Run], path: Path) -> None:
    """Plot training and held-out loss of consecutive stages, in bits per byte over the tokens seen."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    seen = 0.0
    for i, run in enumerate(stages):
        c, meta = run.config, run.train_data.stores[0].meta
        to_bits = meta["tokens"] / meta["utf8_bytes"] / math.log(2)
        per_step = c.batch_size * c.seq_len / 1e6
        rows = metrics(run)
        train_rows = [r for r in rows if "loss" in r]
        eval_rows = [r for r in rows if "eval_loss" in r]
        axes.plot(
            [seen + r["step"] * per_step for r in train_rows],
            [r["loss"] * to_bits for r in train_rows],
            linewidth=1,
            alpha=0.7,
            color=f"C{i}",
            label=f"training, context {c.seq_len}",
        )
        axes.plot(
            [seen + r["step"] * per_step for r in eval_rows],
            [r["eval_bits_per_byte"] for r in eval_rows],
            "o",
            color=f"C{i}",
            label=f"held out, context {c.seq_len}",
        )
        seen += c.steps * per_step
    title = f"{c.model.num_params / 1e6:.1f}M parameters, ring of {run.program.mesh.shape['sp']} CPU devices"
    axes.set(xlabel="tokens seen (millions)", ylabel="bits per byte", ylim=(0, None), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def heading(text: str) -> None:
    """Print a heading for the output of a run, to the same stream."""
    print(text, file=sys.stderr)


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    start = time.perf_counter()
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # keep stdout and stderr in order, also in a file
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Other arguments, such as --config.steps=50, override configs/quickstart.py."
    )
    _, overrides = parser.parse_known_args()
    config = parse(load_config("configs/quickstart.py", ["--config.run_dir=runs/quickstart", *overrides]))
    simulate_cpu_devices(config.cpu_devices)
    run_dir = Path(config.run_dir)
    shutil.rmtree(
        run_dir, ignore_errors=True
    )  # the quickstart always starts from scratch; the token store is elsewhere
    first = prepare(short_context(config))
    heading(f"1 of 3: train at a context of {first.config.seq_len}, where attention is learnt sooner:")
    train(first)
    run = prepare(replace(config, init_from=str(first.run_dir)))
    heading(f"\n2 of 3: train at a context of {config.seq_len}, over a ring of {run.program.mesh.shape['sp']}:")
    train(run)

    print("\n3 of 3: the trained model with three kinds of attention, on held-out text:")
    error = compare_attention(run)
    plot([first, run], run_dir / "loss.png")
    bits = [row["eval_bits_per_byte"] for row in metrics(first) + metrics(run) if "eval_bits_per_byte" in row]
    speeds = [row["tokens_per_second"] for row in metrics(run) if "tokens_per_second" in row]
    summary = {
        "seconds": round(time.perf_counter() - start, 1),
        "bits_per_byte_before": round(bits[0], 4),
        "bits_per_byte_after": round(bits[-1], 4),
        "ring_vs_vanilla_max_rel_err": error,
        "tokens_per_second": round(float(np.median(speeds))),
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{run_dir}: checkpoints, metrics.jsonl, loss.png, summary.json")
    print(json.dumps(summary, indent=1))
    continue_prompt(run)
    if error >= 1e-4:
        sys.exit(f"ring and vanilla attention differ by {error:.1e}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"quickstart: {error}")
