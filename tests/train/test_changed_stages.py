"""Stages whose predecessors changed, runs that are finished, and processes that start at once: the command itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from ringformer.checkpoints.saved_model import latest_step
from ringformer.cli import main
from ringformer.processes.run_lock import RunLock
from ringformer.train import program
from tests.cpu_flags import cpu_environment

CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.data.source = "text:{folder}/*.txt"
    config.data.store = "{folder}/store"
    config.data.held_out = 0.0
    config.run_dir = "{folder}/run"
    config.cpu_devices = 8
    config.mesh_dim = "1,8,1,1"
    config.seq_len, config.batch_size = 64, 8
    config.optimizer.warmup_steps = 1
    config.model.hidden_size = 32
    config.model.num_layers = 1
    config.model.compute_dtype = "float32"
    config.steps = {steps}
    config.stages = {stages}
    return config
"""


def learning_step(state, batch):
    state, metrics = counting_step(state, batch)
    return state._replace(params=jax.tree.map(lambda x: x + 1, state.params)), metrics


def counting_step(state, batch):
    del batch
    return state._replace(step=state.step + 1), {"loss": 1.0, "grad_norm": 1.0, "tokens": 64, "masked": 0, "skipped": 0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{i} ring block key " * 40)
    monkeypatch.setattr(program, "make_train_step", lambda *_, **__: counting_step)
    return tmp_path


def write_config(folder, *stage_steps: int, steps: int = 2) -> None:
    stages = tuple({"steps": n, "seq_len": 64 + 64 * i} for i, n in enumerate(stage_steps))
    (folder / "config.py").write_text(CONFIG.format(folder=folder, stages=stages, steps=steps))


def train(folder, *arguments: str) -> int:
    return main(["train", f"--config={folder}/config.py", *arguments])


def reached(folder) -> list[int | None]:
    return [latest_step(folder / "run" / f"stage-{i}-{64 * i}") for i in (1, 2, 3)]


@pytest.mark.slow
def test_a_stage_whose_predecessor_changed_is_refused_or_begun_anew(folder, capfd):
    """The first of three is lengthened after all were trained."""
    write_config(folder, 2, 3, 4)
    assert train(folder) == 0 and reached(folder) == [2, 3, 4]
    assert train(folder) == 0 and reached(folder) == [2, 3, 4]
    second = folder / "run" / "stage-2-128"
    kept = (second / "metrics.jsonl").read_bytes()
    capfd.readouterr()

    write_config(folder, 5, 3, 4)
    assert train(folder) == 2
    said = capfd.readouterr().err
    assert "stage 1: steps 2 -> 5" in said and "stage 2: stage 1, which it began with, is to go on" in said
    assert "stage 3: stage 2, which it began with, has to begin anew" in said
    assert said.rstrip().endswith("--allow=steps,stage-2,stage-3")
    for too_little in ("steps", "steps,stage-2", "stage-2,stage-3"):
        assert train(folder, f"--allow={too_little}") == 2 and reached(folder) == [2, 3, 4]

    assert train(folder, "--allow=steps,stage-2,stage-3") == 0 and reached(folder) == [5, 3, 4]
    aside = folder / "run" / "replaced-1-stage-2-128"
    assert (aside / "metrics.jsonl").read_bytes() == kept and latest_step(aside) == 3
    changes = (folder / "run" / "stage-1-64" / "changes.jsonl").read_text()
    assert json.loads(changes) == {"step": 2, "changes": {"steps": [2, 5]}}
    origin = json.loads((second / "identity.json").read_text())["identity"]["init_from"]
    assert origin["step"] == 5 and not (second / "changes.jsonl").exists()
    assert train(folder) == 0, "and that is how it is now"
    assert not (folder / "run" / "replaced-2-stage-2-128").exists()


@pytest.mark.slow
def test_a_predecessor_that_was_trained_again_is_another(folder, capfd, monkeypatch):
    """At the same step: its checkpoint is not the one that the stage began with; of the same bits it would be."""
    write_config(folder, 2, 3)
    assert train(folder) == 0
    first = folder / "run" / "stage-1-64"
    first.rename(folder / "old")
    assert train(folder) == 2
    assert "stage 2: stage 1, which it began with, is to go on from step 0 to 2" in capfd.readouterr().err
    with monkeypatch.context() as other:
        other.setattr(program, "make_train_step", lambda *_, **__: learning_step)
        assert train(folder, "--stage=1") == 0
    assert train(folder) == 2
    assert "stage 2: it began with stage 1 at step 2 (checkpoint" in capfd.readouterr().err
    assert train(folder, "--allow=stage-2") == 0 and reached(folder)[:2] == [2, 3]


def test_a_finished_run_says_so_and_compiles_nothing(folder, capfd, monkeypatch):
    write_config(folder)
    assert train(folder) == 0
    capfd.readouterr()
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    assert train(folder) == 0
    assert f"{folder}/run is finished, at step 2: there is nothing left to train" in capfd.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    assert train(folder, "--config.seed=4") == 2, "another run is not finished"
    assert "seed 0 -> 4" in capfd.readouterr().err


def start(folder, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ringformer.cli", "train", f"--config={folder}/config.py", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=cpu_environment()
    )


def wait_for_step(folder, step: int, process: subprocess.Popen) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


@pytest.mark.slow
def test_of_two_commands_at_once_one_trains(folder):
    """And the other names it. Killed, it is succeeded at once, and the steps are those of one run."""
    write_config(folder, steps=30)
    main(["data", "prepare", f"--store={folder}/store", f"--source=text:{folder}/*.txt", "--held_out=0.0"])
    both = [start(folder, "--config.checkpoint_every=10") for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    trained, refused = codes.index(0), codes.index(2)
    name = f"is being trained by process {both[trained].pid} on {socket.gethostname()}"
    assert name in said[refused] or "is finished" in said[refused]
    rows = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 31))


@pytest.mark.slow
def test_a_killed_command_is_started_again_at_once(folder):
    write_config(folder, steps=4000)
    first = start(folder, "--config.checkpoint_every=5")
    wait_for_step(folder, 12, first)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    at = latest_step(folder / "run")
    again = start(folder, "--config.checkpoint_every=5")
    wait_for_step(folder, at + 12, again)
    again.kill()
    assert "waiting" not in again.communicate()[1]
    assert [path.name for path in Path(folder, "run", "lock").iterdir()] == ["2.json"]


@pytest.mark.slow
def test_all_processes_of_a_run_are_told_who_holds_its_lock(folder):
    """Process 0 alone looks; two of them, while this process holds it."""
    write_config(folder)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    lock = RunLock(folder / "run")
    lock.take()
    try:
        together = ["--distributed", f"--coordinator_address={address}", "--num_processes=2", "--config.cpu_devices=4"]
        both = [start(folder, *together, f"--process_id={i}") for i in range(2)]
        said = [process.communicate(timeout=200)[1] for process in both]
    finally:
        lock.release()
    assert [process.returncode for process in both] == [2, 2], said
    assert all(f"is being trained by process {os.getpid()} on {socket.gethostname()}" in text for text in said), said
    assert not (folder / "run" / "checkpoints").exists()
