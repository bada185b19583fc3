"""Stages: consecutive runs, each from the parameters of the previous one, usually at a longer context.

    RUN_DIR/stages.json           the record: context, progress and held-out loss of each stage
    RUN_DIR/stage-1-32768/        a run like any other: config.json, metrics.jsonl, checkpoints/
    RUN_DIR/stage-2-131072/

Only parameters pass from stage to stage (each stage has a fresh optimizer and schedule). Finished stages are skipped
and an unfinished stage is resumed, so the same command continues wherever it was interrupted. If a stage began with
parameters that its predecessor no longer has, it is refused. If the user allows it, it begins anew instead, and the old
stage is moved to RUN_DIR/replaced-1-stage-...
"""

import json
import sys
from collections.abc import Collection
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import jax

from ringformer.checkpoints.saved_model import latest_step
from ringformer.files.atomic import write_whole
from ringformer.files.run_layout import METRICS, STAGES
from ringformer.processes.agreement import from_process_0
from ringformer.processes.run_lock import RunLock
from ringformer.processes.stopping import Stopping
from ringformer.runs.config import Config
from ringformer.runs.folder import finished, nothing_left
from ringformer.runs.identity import contents, origin
from ringformer.runs.metrics import read_metrics
from ringformer.runs.record import RunChanged, recorded, set_aside
from ringformer.train.checks import theta_warnings, thetas
from ringformer.train.loop import train
from ringformer.train.prepare import Run, prepare


def prepare_stages(configs: list[Config], only: int | None = None, allow: Collection[str] = ()) -> list[Run]:
    """Check all stages before the first one starts, or check only one stage.

    Args:
      configs: the stages, from `parse_stages`.
      only: number of the stage to check, counted from 1; None: all stages.
      allow: keys that may have changed in stages that began earlier; "stage-2": begin the second stage anew if its
        predecessor no longer has the parameters that the second stage began with.

    Raises:
      ValueError: a stage is impossible with the devices, the data or its own settings (the message names the stage),
        the run directory holds stages of another config, or the predecessor of a single stage is not finished.
      RunChanged: keys changed; one error covers all stages.
    """
    if not configs[0].run_dir:
        raise ValueError("stages need a folder to resume from: set it, e.g. --config.run_dir=runs/mine")
    _check_folder(configs)
    if only is not None and not 1 <= only <= len(configs):
        raise ValueError(f"there is no stage {only}: the config has {len(configs)} stages")
    if only is not None and only > 1 and not finished(configs[only - 2]):
        before = configs[only - 2]
        raise ValueError(
            f"stage {only} begins with the parameters of stage {only - 1}, which is at step "
            f"{latest_step(before.run_dir) or 0} of {before.steps} in {before.run_dir}: finish it first"
        )
    stages = {f"stage-{number}" for number in range(1, len(configs) + 1)}
    for key in allow:
        if key.startswith("stage-") and key not in stages:
            raise ValueError(f"--allow={key}: the config has {len(configs)} stages")
    if jax.process_index() == 0:
        for warning in theta_warnings(configs):
            print(warning, file=sys.stderr)
    anew = _other_beginnings(configs)
    runs = []
    refused = {}
    for number, config in enumerate(configs, 1):
        if only in (None, number):
            try:
                if number in anew and f"stage-{number}" not in allow:
                    raise RunChanged(config.run_dir, anew[number], [f"stage-{number}"])
                runs.append(prepare(config, allow, anew=number in anew))
            except RunChanged as error:
                refused[number] = error
            except ValueError as error:
                raise ValueError(f"stage {number}: {error}") from None
    if refused:
        changes = []
        keys: dict[str, None] = {}
        for number, refusal in refused.items():
            changes.append(f"stage {number}: {refusal.changes}")
            keys |= dict.fromkeys(refusal.keys)
        raise RunChanged(Path(configs[0].run_dir).parent, "; ".join(changes), keys)
    return runs


def train_stages(configs: list[Config], runs: list[Run], stopping: Stopping | None = None) -> None:
    """Train each of `runs` (from `prepare_stages`) that is not finished, and keep the record of all `configs`.

    `stopping` may end a stage early, as in `train`; the record then has the step that was saved last.
    """
    with RunLock(Path(configs[0].run_dir).parent):
        if jax.process_index() == 0:
            _begin_anew(configs, runs)
        from_process_0("")  # the others wait until it is done
        for run in runs:
            if jax.process_index() == 0:
                _write_record(configs)
            # Earlier stages need no check here: each is verified when the next one starts from it.
            is_done = nothing_left if run is runs[-1] else finished
            if not is_done(run.config):
                try:
                    train(run, stopping)
                finally:
                    if jax.process_index() == 0:
                        _write_record(configs)
        if jax.process_index() == 0:
            print(record_table(_write_record(configs)))


def _other_beginnings(configs: list[Config]) -> dict[int, str]:
    """Return, by stage number, how the predecessor of a stage that has checkpoints has changed since that stage
    began."""
    others: dict[int, str] = {}
    for number, (before, config) in enumerate(pairwise(configs), 2):
        if latest_step(config.run_dir) is None:
            continue
        began = recorded(config.run_dir)["init_from"] or {}
        step = latest_step(before.run_dir) or 0
        now = origin(before.run_dir) or {}
        if number - 1 in others:
            others[number] = f"stage {number - 1}, which it began with, has to begin anew"
        elif step < before.steps:
            others[number] = f"stage {number - 1}, which it began with, is to go on from step {step} to {before.steps}"
        elif "checkpoint" in began and contents(began) != contents(now):
            others[number] = (
                f"it began with stage {number - 1} at step {began['step']} (checkpoint "
                f"{began['checkpoint']}), which is now at step {step} ({now['checkpoint']})"
            )
    return others


def _begin_anew(configs: list[Config], runs: list[Run]) -> None:
    """Set aside the folders of stages that have to begin anew. Raises RunChanged if beginning anew is not allowed."""
    others = _other_beginnings(configs)
    for run in runs:
        number = configs.index(run.config) + 1
        if number in others:
            if f"stage-{number}" not in run.allow:
                raise RunChanged(run.run_dir, others[number], [f"stage-{number}"])
            lock = RunLock(run.run_dir)
            lock.take()
            aside = set_aside(run.run_dir)
            lock.release()
            print(f"{run.run_dir} begins anew: {others[number]}; the old run is in {aside}", file=sys.stderr)


def record_table(record: list[dict[str, Any]]) -> str:
    """Format the record as a table."""
    lines = [f"{'stage':>5} {'context':>10} {'theta':>9} {'steps':>7} {'tokens':>15} {'held-out loss':>18}  state"]
    for row in record:
        first = row["eval_loss_first"]
        last = row["eval_loss_last"]
        losses = f"{first:.4f} -> {last:.4f}" if first is not None else "-"
        lines.append(
            f"{row['stage']:>5} {row['seq_len']:>10,} {row.get('rope_theta', nan):>9.3g} {row['steps']:>7,} "
            f"{row['tokens']:>15,} {losses:>18}  {row['state']}"
        )
    return "\n".join(lines)


def _write_record(configs: list[Config]) -> list[dict[str, Any]]:
    """Write the record of all stages, and return it; only process 0 calls this."""
    folder = Path(configs[0].run_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    record = [_row(number, config) for number, config in enumerate(configs, 1)]
    write_whole(folder / STAGES, json.dumps(record, indent=1) + "\n")
    return record


def _row(number: int, config: Config) -> dict[str, Any]:
    """Return the record of a stage.

    Losses are in nats per token, on held-out data at the stage's own context: one loss is that of the stage's initial
    parameters, the other that of its latest evaluation.
    """
    rows = read_metrics(Path(config.run_dir, METRICS))
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    step = latest_step(config.run_dir) or 0
    state = "not begun"
    if finished(config):
        state = "finished"
    elif rows or step:
        state = f"at step {step}"
    return {
        "stage": number,
        "run_dir": Path(config.run_dir).name,
        "seq_len": config.seq_len,
        **thetas(config.model),
        "mesh_dim": config.mesh_dim,
        "steps": config.steps,
        "tokens": config.steps * config.batch_size * config.seq_len,
        "state": state,
        "eval_loss_first": losses[0] if losses else None,
        "eval_loss_last": losses[-1] if losses else None,
    }


def _check_folder(configs: list[Config]) -> None:
    folder = Path(configs[0].run_dir).parent
    ours = {Path(config.run_dir).name for config in configs}
    others = sorted(path.name for path in folder.glob("stage-*-*") if path.name not in ours)
    if others:
        raise ValueError(
            f"{folder} holds {', '.join(others)}, which this config does not have (its stages: "
            f"{', '.join(sorted(ours))}): choose another run_dir"
        )
