"""Stages: runs one after the other, each from the parameters of the one before, usually at a longer context.

    RUN_DIR/stages.json           the record: what each stage is, whether it is finished, its held-out loss
    RUN_DIR/stage-1-32768/        a run as any other: config.json, metrics.jsonl, checkpoints/
    RUN_DIR/stage-2-131072/

Only parameters go from stage to stage (each has a fresh optimizer and schedule). A finished stage is passed over and
an unfinished one resumed, so that the same command goes on wherever it was interrupted.
"""

from math import nan
from pathlib import Path

import jax

from ringformer.train.checkpoints import latest_step
from ringformer.train.config import Config
from ringformer.train.loop import Run, prepare, train, write_json
from ringformer.train.reporter import read_metrics


def prepare_stages(configs: list[Config], only: int | None = None) -> list[Run]:
    """Check every stage, `configs` from `parse_stages`, before the first one starts; or stage `only` (from 1) alone.

    Raises ValueError, naming the stage, for one that the devices, the data or its own settings do not allow, and if
    the run directory holds stages of another config or what a single stage begins with is not finished.
    """
    if not configs[0].run_dir:
        raise ValueError("stages need a folder to go on from: name it, e.g. --config.run_dir=runs/mine")
    _check_folder(configs)
    if only is not None and not 1 <= only <= len(configs):
        raise ValueError(f"there is no stage {only}: the config has {len(configs)} stages")
    if only is not None and only > 1 and not finished(configs[only - 2]):
        before = configs[only - 2]
        raise ValueError(
            f"stage {only} begins with the parameters of stage {only - 1}, which is at step "
            f"{latest_step(before.run_dir) or 0} of {before.steps} in {before.run_dir}: finish it first"
        )
    runs = []
    for number, config in enumerate(configs, 1):
        if only in (None, number):
            try:
                runs.append(prepare(config))
            except ValueError as error:
                raise ValueError(f"stage {number}: {error}") from None
    return runs


def train_stages(configs: list[Config], runs: list[Run]) -> None:
    """Train each of `runs` (from `prepare_stages`) that is not finished, and keep the record of all of `configs`."""
    for run in runs:
        _write_record(configs)
        if not finished(run.config):
            train(run)
    _write_record(configs)
    if jax.process_index() == 0:
        print(record_table(_record(configs)))


def finished(config: Config) -> bool:
    """Whether the checkpoint of the stage's last step exists, and its evaluation if there are held-out data."""
    rows = read_metrics(Path(config.run_dir, "metrics.jsonl"))
    evaluated = any(row["step"] == config.steps and "eval_tokens" in row for row in rows)
    return (latest_step(config.run_dir) or 0) >= config.steps and (evaluated or not config.data.held_out)


def record_table(record: list[dict]) -> str:
    """The record as a table."""
    lines = [f"{'stage':>5} {'context':>10} {'theta':>9} {'steps':>7} {'tokens':>15} {'held-out loss':>18}  state"]
    for row in record:
        first, last = row["eval_loss_first"], row["eval_loss_last"]
        losses = f"{first:.4f} -> {last:.4f}" if first is not None else "-"
        lines.append(f"{row['stage']:>5} {row['seq_len']:>10,} {row.get('rope_theta', nan):>9.3g} {row['steps']:>7,} "
                     f"{row['tokens']:>15,} {losses:>18}  {row['state']}")  # fmt: skip
    return "\n".join(lines)


def _write_record(configs: list[Config]) -> None:
    if jax.process_index() == 0:  # the others could read what it is just writing
        folder = Path(configs[0].run_dir).parent
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "stages.json", _record(configs))


def _record(configs: list[Config]) -> list[dict]:
    return [_row(number, config) for number, config in enumerate(configs, 1)]


def _row(number: int, config: Config) -> dict:
    """The record of a stage. Losses are nats a token on held-out data at the stage's own context: with the parameters
    that it began with, and at its latest evaluation."""
    rows = read_metrics(Path(config.run_dir, "metrics.jsonl"))
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    step, model = latest_step(config.run_dir) or 0, config.model
    return {
        "stage": number,
        "run_dir": Path(config.run_dir).name,
        "seq_len": config.seq_len,
        **{name: x for name in model.CONTEXT if isinstance(x := getattr(model, name), float)},
        "mesh_dim": config.mesh_dim,
        "steps": config.steps,
        "tokens": config.steps * config.batch_size * config.seq_len,
        "state": "finished" if finished(config) else f"at step {step}" if rows else "not begun",
        "eval_loss_first": losses[0] if losses else None,
        "eval_loss_last": losses[-1] if losses else None,
    }


def _check_folder(configs: list[Config]) -> None:
    folder = Path(configs[0].run_dir).parent
    ours = {Path(config.run_dir).name for config in configs}
    if others := sorted(path.name for path in folder.glob("stage-*-*") if path.name not in ours):
        raise ValueError(
            f"{folder} holds {', '.join(others)}, which this config does not have (its stages: "
            f"{', '.join(sorted(ours))}): choose another run_dir"
        )
