"""A run that goes on from an older checkpoint than its newest: what was known of the steps after it is forgotten."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from ringformer.checkpoints.verify import saved_steps, tree_folder
from ringformer.runs.folder import finished, nothing_left
from ringformer.train import evaluation
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.damage import flip
from tests.processes.test_stopping import rows


@pytest.mark.slow
def test_the_best_one_is_not_judged_by_losses_of_steps_made_again(config, steps, monkeypatch):
    """Steps 4 and 6 were the best, are lost, and come out worse: step 2 is the best and stays."""
    losses = [9.0, 5.0, 2.0, 1.0] + [7.0, 8.0]

    def evaluate(*_, stop, likelihood):
        return {"eval_loss": losses.pop(0), "eval_tokens": 1, "eval_by_position": []}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    config = dataclasses.replace(config, checkpoint_every=2, eval_every=2, keep_checkpoints=1, keep_best=1)
    train(prepare(dataclasses.replace(config, keep_checkpoints=9)))
    assert saved_steps(config.run_dir) == [2, 4, 6]
    for step in (4, 6):
        shutil.rmtree(Path(config.run_dir, "checkpoints", str(step)))
    train(prepare(config))
    assert not losses and saved_steps(config.run_dir) == [2, 6]


def test_rows_that_are_lost_are_told_and_skipped_steps_are_remembered(config, steps, capfd):
    steps.at[2] = lambda state, metrics: (state, metrics | {"skipped": 1, "loss": math.nan, "grad_norm": math.nan})
    config = dataclasses.replace(
        config, checkpoint_every=3, optimizer=dataclasses.replace(config.optimizer, warmup_steps=0)
    )
    train(prepare(config))
    rates = {row["step"]: row["learning_rate"] for row in rows(config) if "learning_rate" in row}
    assert rates[2] == rates[3], "the schedule waited for step 2"
    shutil.rmtree(Path(config.run_dir, "checkpoints", "6"))
    train(prepare(config))
    assert "lacks the rows" not in capfd.readouterr().err, "of a skipped step there is one"
    shutil.rmtree(Path(config.run_dir, "checkpoints", "6"))
    metrics = Path(config.run_dir, "metrics.jsonl")
    kept = [row for row in rows(config) if row["step"] > 2]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    train(prepare(config))
    assert "metrics.jsonl lacks the rows of 2 of the 3 steps so far" in capfd.readouterr().err
    again = {row["step"]: row["learning_rate"] for row in rows(config) if "learning_rate" in row}
    assert [again[step] for step in (4, 5, 6)] == [rates[step] for step in (4, 5, 6)]


@pytest.mark.slow
def test_a_finished_run_whose_last_checkpoint_is_damaged_is_not_finished(config, steps, capfd):
    config = dataclasses.replace(config, checkpoint_every=3)
    train(prepare(config))
    assert nothing_left(config)
    flip(tree_folder(config.run_dir, 6) / "params.embed" / "0.0", np.random.default_rng(0))
    assert finished(config) and not nothing_left(config)
    assert int(train(prepare(config)).step) == 6 and nothing_left(config)
    assert "step 6 is damaged" in capfd.readouterr().err
    own = dataclasses.replace(config, copy_to=f"file://{config.run_dir}")
    assert not nothing_left(own), "its own folder is no copy of it"
    with pytest.raises(ValueError, match="are one place, or one is in the other: name another place for the copies"):
        train(prepare(own))
    assert nothing_left(config)
