"""SIGTERM and the clock save a run; broken numbers never are. Whole loops, around a step that only counts."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from ringformer.checkpoints.saved_model import latest_step
from ringformer.processes.stopping import Stopped, Termination
from ringformer.train import evaluation, loop, saving
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from ringformer.train.saving import SaveClock


def rows(config):
    return [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]


def test_sigterm_saves_and_the_same_command_goes_on(config, steps):
    def terminate(state, metrics):
        os.kill(os.getpid(), signal.SIGTERM)
        return state, metrics

    steps.at[4] = terminate
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="stopped by SIGTERM at step 4 of 6, which is saved in"):
        train(prepare(config))
    assert signal.getsignal(signal.SIGTERM) is before
    assert latest_step(config.run_dir) == 4
    assert [row["step"] for row in rows(config) if "loss" in row] == [1, 2, 3, 4]
    state = train(prepare(config))
    assert int(state.step) == 6
    assert [row["step"] for row in rows(config) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_sigterm_in_an_evaluation_saves_too(config, steps, monkeypatch):
    """Though nothing was to be saved at its step."""
    evaluated = []

    def evaluate(*_, stop, likelihood):
        evaluated.append(1)
        if len(evaluated) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return None if stop() else {"eval_loss": 1.0, "eval_tokens": 1, "eval_by_position": []}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    with pytest.raises(Stopped, match="at step 3 of 6, which is saved"):
        train(prepare(dataclasses.replace(config, eval_every=3)))
    assert latest_step(config.run_dir) == 3


def test_sigterm_waits_for_the_last_save(config, steps, monkeypatch):
    """While it is being written, after the last step."""
    close = loop.Checkpoints.close

    def slow_close(self):
        os.kill(os.getpid(), signal.SIGTERM)
        close(self)

    monkeypatch.setattr(loop.Checkpoints, "close", slow_close)
    assert int(train(prepare(config)).step) == latest_step(config.run_dir) == 6


def test_an_evaluation_that_sigterm_cut_off_comes_with_the_next_start(config, steps):
    """At the last step: it is saved first, and the evaluation is made up for."""
    steps.at[6] = lambda state, metrics: (os.kill(os.getpid(), signal.SIGTERM), (state, metrics))[1]
    with pytest.raises(Stopped):
        train(prepare(config))
    assert latest_step(config.run_dir) == 6
    assert [row["step"] for row in rows(config) if "eval_loss" in row] == [0]
    train(prepare(config))
    assert [row["step"] for row in rows(config) if "eval_loss" in row] == [0, 6]
    train(prepare(config))
    assert [row["step"] for row in rows(config) if "eval_loss" in row] == [0, 6], "once is enough"


@pytest.mark.slow
def test_a_terminated_process_says_so_and_is_resumed(config, tmp_path):
    """The command itself, and the signal that a scheduler sends: exit code 75, and nothing trained twice."""
    path, metrics = tmp_path / "config.py", tmp_path / "cli" / "metrics.jsonl"
    path.write_text(
        "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    config = base_config('tiny')\n"
        f"    config.data.store, config.data.source = '{tmp_path}/store', 'text:{tmp_path}/*.txt'\n"
        f"    config.run_dir, config.data.held_out = '{tmp_path}/cli', 0.2\n    config.cpu_devices = 8\n"
        "    config.mesh_dim, config.seq_len, config.steps, config.eval_batches = '1,1,1,8', 64, 4000, 1\n"
        "    config.batch_size = 1\n    return config\n"
    )
    command = [sys.executable, "-m", "ringformer.cli", "train", f"--config={path}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (metrics.exists() and '"step": 5' in metrics.read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 75 and "the same command resumes the run" in said
    at = latest_step(tmp_path / "cli")
    assert f"stopped by SIGTERM at step {at} of 4000" in said and at >= 5
    steps = [row["step"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row]
    assert steps == list(range(1, at + 1))
    again = subprocess.run([*command, "--allow=steps", f"--config.steps={at + 2}"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    steps = [row["step"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row]
    assert steps == list(range(1, at + 3))


def test_a_second_sigterm_ends_the_process_as_ever():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("usual"))
    try:
        with Termination() as termination:
            os.kill(os.getpid(), signal.SIGTERM)
            assert termination.due() and not seen
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ["usual"]
    finally:
        signal.signal(signal.SIGTERM, before)


def _nan_gradient(state, metrics):
    return state, metrics | {"grad_norm": float("nan"), "skipped": 1}


def _nan_state(state, metrics):
    return state._replace(params=state.params | {"embed": state.params["embed"] * jnp.nan}), metrics


@pytest.mark.parametrize("every", [1, 2, 0])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_nan_gradient, "1 steps in a row are skipped, 4 to 4"),
        (_nan_state, "the state after step . has numbers that are not finite"),
    ],
    ids=["gradient", "state"],
)
def test_what_is_not_finite_is_never_saved_nor_evaluated(config, steps, broken, message, every):
    steps.at[4] = broken
    with pytest.raises(FloatingPointError, match=message):
        train(prepare(dataclasses.replace(config, checkpoint_every=every, eval_every=every, max_skipped_in_a_row=0)))
    assert (latest_step(config.run_dir) or 0) == {1: 3, 2: 2, 0: 0}[every]
    assert len(steps.evaluated) == {1: 4, 2: 2, 0: 1}[every]


def test_the_clock_saves(config, steps, monkeypatch):
    now = 0.0
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)

    def twenty_minutes(state, metrics):
        nonlocal now
        now += 20 * 60
        return state, metrics

    saved, save = [], loop.Checkpoints.save

    def count_and_save(self, state, about):
        saved.append(int(state.step))
        save(self, state, about)

    monkeypatch.setattr(loop.Checkpoints, "save", count_and_save)
    steps.at = dict.fromkeys(range(1, 7), twenty_minutes)
    train(prepare(config))
    assert saved == [2, 4, 6], "every 30 minutes by default"


def test_several_processes_save_at_the_same_steps(monkeypatch):
    """Each has a clock of its own, and hears of process 0's; they ask some ten times an interval."""
    clocks, answers, asked = {0: 0.0, 1: 500.0}, [], 0
    process = 0

    def broadcast(answer):
        nonlocal asked
        asked += process == 0
        if process == 0:
            answers.append(answer)
        return answers[-1]

    monkeypatch.setattr(saving.time, "monotonic", lambda: clocks[process])
    monkeypatch.setattr(saving.jax, "process_count", lambda: 2)
    monkeypatch.setattr(saving, "from_process_0", broadcast)
    both = []
    for process in (0, 1):  # noqa: B007
        both.append(SaveClock(minutes=10, step=0))
    saved = {0: [], 1: []}
    for step in range(1, 1001):
        for process in (0, 1):
            clocks[process] += 3.0 + process * 0.5
            if both[process].due(step):
                both[process].saved(step)
                saved[process].append(step)
    assert saved[0] == saved[1] and all(200 <= b - a <= 220 for a, b in zip(saved[0], saved[0][1:], strict=False))
    assert len(saved[0]) == 5 and asked < 60


def test_several_processes_never_save_after_infinite_minutes(monkeypatch):
    monkeypatch.setattr(saving.jax, "process_count", lambda: 2)
    monkeypatch.setattr(saving, "from_process_0", lambda answer: answer)
    clock = SaveClock(minutes=math.inf, step=0)
    assert not any(clock.due(step) for step in range(1, 100))


def test_no_clock_without_minutes():
    clock = SaveClock(0, 0)
    time.sleep(0.01)
    assert not any(clock.due(step) for step in range(1, 100))
