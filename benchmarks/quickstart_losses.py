"""Held-out losses of runs of the quickstart's model that differ in one setting, and how they compare."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.result_files import made
from ringformer.estimate.workloads.targets import installed_version

SEEDS = (0, 1, 2)


def config_flags(changed: dict[str, Any]) -> list[str]:
    """Flags that change keys of a config, on one simulated device."""
    keys = changed | {"mesh_dim": "1,1,1,1", "cpu_devices": 1}
    return [f"--config.{key}={value}" for key, value in keys.items()]


def last_eval_loss(run_dir: Path) -> float:
    """The held-out loss of a run's last evaluation, in nats a token."""
    losses = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval_loss" in row:
            losses.append(row["eval_loss"])
    return losses[-1]


def above(control: list[float], losses: list[float]) -> dict[str, Any]:
    """Losses relative to those of a control with the same seeds, with the spread of the seeds."""
    relative = [loss / other - 1 for other, loss in zip(control, losses, strict=True)]
    return {"above_float32": relative, "mean": mean(relative), "standard_deviation": stdev(relative)}


def origin(steps: int) -> dict[str, Any]:
    """Versions, commit, date, steps and seeds of measured losses."""
    versions = {name: installed_version(name) for name in ("jax", "jaxlib", "optax")}
    return {**made(), "versions": versions, "steps": steps, "seeds": SEEDS}
