"""Stages: resolved and checked before the first one starts, each from the last one's parameters, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from ringformer.checkpoints.saved_model import latest_step
from ringformer.inference.generator import load_model
from ringformer.processes.stopping import INTERRUPTED, Stopped
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse, parse_stages
from ringformer.train import stages
from ringformer.train.stages import prepare_stages
from tests.cpu_flags import cpu_environment

STAGES = (
    {"seq_len": 64, "batch_size": 8, "mesh_dim": "1,4,1,2", "steps": 4},
    {"seq_len": 128, "batch_size": 4, "mesh_dim": "1,1,1,8", "steps": 12, "model.rope_theta": 4e4},
)
CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.data.source = "text:{folder}/*.txt"
    config.data.store = "{folder}/store"
    config.data.held_out = 0.2
    config.run_dir = "{folder}/run"
    config.cpu_devices = 8
    config.eval_batches = 1
    config.checkpoint_every = 2
    config.optimizer.warmup_steps = 1
    config.optimizer.learning_rate = 1e-2
    config.model.hidden_size = 32
    config.model.num_layers = 1
    config.model.compute_dtype = "float32"
    config.stages = {stages}
    return config
"""


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(40):
        words = rng.choice(["ring", "block", "key", "query", "value"], rng.integers(5, 200))
        (tmp_path / f"{i}.txt").write_text(" ".join(words))
    (tmp_path / "config.py").write_text(CONFIG.format(folder=tmp_path, stages=STAGES))
    return tmp_path


def config(folder, *stages):
    values = base_config("tiny")
    values.run_dir, values.data.store = f"{folder}/run", f"{folder}/store"
    values.data.source, values.data.held_out = f"text:{folder}/*.txt", 0.2
    values.optimizer.warmup_steps, values.eval_batches = 1, 1
    values.stages = stages
    return values


def test_stages_differ_from_the_config_by_their_overrides_alone(folder):
    first, second = parse_stages(config(folder, *STAGES))
    assert (first.seq_len, first.mesh_dim, first.model.rope_theta, first.init_from) == (64, "1,4,1,2", 1e4, "")
    assert (second.seq_len, second.model.rope_theta) == (128, 4e4)
    assert (first.run_dir, second.run_dir) == (f"{folder}/run/stage-1-64", f"{folder}/run/stage-2-128")
    assert second.init_from == first.run_dir and (first.seed, second.seed) == (0, 1)
    assert first.data == second.data and first.optimizer == second.optimizer
    with pytest.raises(ValueError, match="2 stages, one run was expected"):
        parse(config(folder, *STAGES))


def test_a_config_without_stages_is_itself(folder):
    assert parse_stages(config(folder)) == [parse(config(folder))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 32}, "stage 2 shrinks the context, from 64 to 32 tokens"),
        ({"optimizer.learning_rat": 1e-4}, r"stage 2: .*'optimizer.learning_rat'; did you mean 'optimizer.learning_r"),
        ({"steps": "many"}, "stage 2: steps='many'"),
        ({"steps": 0}, "stage 2: steps=0 must be at least 1"),
        ({"model.hidden_size": 64}, "stage 2: model.hidden_size is the same in all stages"),
        (
            {"model.rope_theta": 1e6, "model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 2.0},
            "stage 2: .*set the theta or the scaling",
        ),
    ],
    ids=str,
)
def test_stages_that_cannot_be(folder, change, message):
    with pytest.raises(ValueError, match=message):
        parse_stages(config(folder, STAGES[0], STAGES[1] | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh_dim": "1,1,1,7"}, "stage 2: .*needs 7 devices, there are 8"),
        ({"batch_size": 3, "mesh_dim": "1,2,1,4"}, "stage 2: batch_size=3 is not a multiple of 2"),
        ({"seq_len": 2**20}, "stage 2: .*fewer than the 1048577"),
        ({"data.min_length": 10**6}, "stage 2: none of the .* has min_length=1000000"),
        ({"batch_size": 256}, "stage 2: the held-out data has .* fewer than batch_size=256"),
    ],
    ids=str,
)
def test_every_stage_is_checked_before_the_first_starts(folder, change, message):
    with pytest.raises(ValueError, match=message):
        prepare_stages(parse_stages(config(folder, STAGES[0], STAGES[1] | change)))
    assert not (folder / "run").exists()


def test_folders_of_other_stages_and_unfinished_ones_are_refused(folder):
    configs = parse_stages(config(folder, *STAGES))
    with pytest.raises(ValueError, match="stage 1, which is at step 0 of 4"):
        prepare_stages(configs, only=2)
    with pytest.raises(ValueError, match="no stage 3: the config has 2"):
        prepare_stages(configs, only=3)
    (folder / "run" / "stage-2-256").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds stage-2-256, which this config does not have"):
        prepare_stages(configs)


def test_the_record_has_the_step_at_which_a_stage_was_stopped(folder, monkeypatch):
    """With a trainer that finishes the first stage and is stopped in the second, which has not reported a step yet."""
    configs = parse_stages(config(folder, *STAGES))
    last = {configs[0].run_dir: 4, configs[1].run_dir: 2}

    def train(run, _stopping):
        run.run_dir.mkdir(parents=True)
        trained.append(run.config.run_dir)
        if run.config is configs[1]:
            raise Stopped("stopped at step 2", INTERRUPTED)

    trained: list[str] = []
    monkeypatch.setattr(stages, "train", train)
    monkeypatch.setattr(stages, "latest_step", lambda run_dir: last[run_dir] if run_dir in trained else None)
    runs = [SimpleNamespace(config=c, run_dir=Path(c.run_dir), allow=()) for c in configs]
    with pytest.raises(Stopped):
        stages.train_stages(configs, runs)
    states = [row["state"] for row in json.loads((folder / "run" / "stages.json").read_text())]
    assert states == ["at step 4", "at step 2"]  # the first has no evaluation here


@pytest.mark.slow
def test_stages_killed_in_the_second_end_as_if_they_had_not_been(folder):
    """SIGKILL after a checkpoint of stage 2; the same command gives the same parameters, to the bit."""
    command = [sys.executable, "-m", "ringformer.cli", "train", f"--config={folder}/config.py"]
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    quiet = {"env": cpu_environment(**cache), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*command, f"--config.run_dir={folder}/whole"], check=True, **quiet)
    metrics = folder / "run" / "stage-2-128" / "metrics.jsonl"
    process = subprocess.Popen(command, **quiet)
    while not (folder / "run" / "stage-2-128" / "checkpoints" / "4").is_dir():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    record = json.loads((folder / "run" / "stages.json").read_text())
    assert [row["state"] for row in record] == ["finished", "not begun"]  # as it was when stage 2 began
    before = metrics.read_text().splitlines()
    assert not (folder / "run" / "stage-2-128" / "checkpoints" / "12").is_dir()

    subprocess.run(command, check=True, **quiet)
    assert metrics.read_text().splitlines()[:4] == before[:4], "the steps before the kill are not trained again"
    for a, b in zip(parameters(folder / "run"), parameters(folder / "whole"), strict=True):
        np.testing.assert_array_equal(a, b)
    record = json.loads((folder / "run" / "stages.json").read_text())
    assert [(row["state"], row["tokens"]) for row in record] == [("finished", 2048), ("finished", 6144)]
    assert all(row["eval_loss_last"] < row["eval_loss_first"] for row in record)
    # What stage 2 begins with is what stage 1 ended with, at another context and theta.
    assert record[1]["eval_loss_first"] < record[0]["eval_loss_first"] - 0.1


def parameters(run: Path) -> list[np.ndarray]:
    assert latest_step(run / "stage-2-128") == 12
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(load_model(run / "stage-2-128")))]
