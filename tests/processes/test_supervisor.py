"""Real processes of the command: signalled, killed, stopped, stuck. All end alike, with one line of why."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ringformer.checkpoints.saved_model import latest_step
from tests.cpu_flags import cpu_environment
from tests.train.runs import flatten, read_parameters

ROOT = Path(__file__).parent.parent.parent

CONFIG = """
import os
import time
from pathlib import Path

from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.data.source = "text:{folder}/texts/*.txt"
    config.data.store = "{folder}/store"
    config.data.held_out = 0.0
    config.run_dir = "{folder}/run"
    config.mesh_dim = "1,2,1,2"
    config.seq_len = 64
    config.batch_size = 4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    config.model.hidden_size = 32
    config.model.num_layers = 1
    config.model.compute_dtype = "float32"
    config.steps = 100000
    return config


# A test's own trouble, of the process whose number is OF.
trouble = os.environ.get("TROUBLE")

if trouble in ("stuck", "refused", "input", "slow"):
    from ringformer.data import Loader

    def stuck_iterate(self, start, sharding, iterate=Loader.iterate):
        if trouble == "refused":
            raise ValueError("its disk is another")
        for number, batch in enumerate(iterate(self, start, sharding), start + 1):
            if trouble == "slow":
                time.sleep(0.1)
            if trouble == "stuck" and number == 5:
                time.sleep(1000)
            if trouble == "input" and number == 13:
                raise OSError(5, "Input/output error")
            yield batch

    Loader.iterate = stuck_iterate

if trouble == "report":
    from ringformer.runs.metrics import Reporter

    def failing_step(self, step, values, report=Reporter.step):
        report(self, step, values)
        if step == 7:
            raise OSError(28, "No space left on device")

    Reporter.step = failing_step

if trouble == "evaluation":
    from ringformer.train.evaluation import Evaluation

    def failing_evaluation(self, state, step, run_if_due=Evaluation.run_if_due):
        if step == 12:
            raise OSError(5, "Input/output error")
        run_if_due(self, state, step)

    Evaluation.run_if_due = failing_evaluation
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache of compiled programs: the processes of these tests compile the same ones."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(rng.choice(["ring", "block", "key", "query"], 60)))
    (tmp_path / "config.py").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def nobody_reads() -> int:
    """The end of a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.fixture
def start(folder, compiled):
    """`start(count, *options, **environment)`: the command in so many processes, four devices in all."""
    started = []

    def start(count, *options, closed=False, **environment):
        with socket.create_server(("", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "ringformer.cli",
            "train",
            f"--config={folder}/config.py",
            f"--config.cpu_devices={4 // count}",
            *options,
        ]
        together = ["--distributed", f"--coordinator_address={address}", f"--num_processes={count}"]
        processes = []
        for i in range(count):
            more = [*together, f"--process_id={i}"] if count > 1 else []
            own = {k: v for k, v in environment.items() if environment.get("OF") in (None, str(i))}
            env = cpu_environment(JAX_COMPILATION_CACHE_DIR=str(compiled), PYTHONPATH=str(ROOT)) | own
            errors = (folder / f"errors-{i}.txt").open("w+")
            stderr = nobody_reads() if closed else errors
            processes.append(
                subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=stderr, env=env, text=True)
            )
            processes[-1].errors = errors
        started.extend(processes)
        return processes

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.errors.close()


def steps(folder):
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def wait_for_step(folder, processes, step, seconds=300):
    end = time.monotonic() + seconds
    while not (found := steps(folder)) or found[-1] < step:
        assert all(process.poll() is None for process in processes), said(processes)
        assert time.monotonic() < end, said(processes)
        time.sleep(0.02)


def ended(processes, seconds):
    """The exit codes, of all in so many seconds."""
    end = time.monotonic() + seconds
    return [process.wait(max(0.1, end - time.monotonic())) for process in processes]


def said(processes):
    """The lines of errors of each."""
    found = []
    for process in processes:
        process.errors.seek(0)
        found.append([line for line in process.errors.read().splitlines() if "ringformer train:" in line])
    return found


def check_stopped(folder, processes, number, seconds):
    """All end with 75, one says so, and one step is saved."""
    assert ended(processes, seconds) == [75] * len(processes), said(processes)
    at = latest_step(folder / "run")
    (line,) = [line for lines in said(processes) for line in lines]
    assert f"stopped by {signal.Signals(number).name} at step {at} of" in line
    assert steps(folder) == list(range(1, at + 1))
    return at


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_saves_both(folder, start):
    processes = start(2)
    wait_for_step(folder, processes, 3)
    processes[1].send_signal(signal.SIGTERM)
    check_stopped(folder, processes, signal.SIGTERM, 30)


@pytest.mark.slow
def test_ten_signals_to_one_of_four_processes(folder, start):
    """Each of them, by both signals; then the run ends as one that nobody stopped does, to the bit."""
    whole = folder / "whole"
    at = 0
    for i in range(10):
        processes = start(4)
        wait_for_step(folder, processes, at + 2 + i % 3)
        number = (signal.SIGTERM, signal.SIGUSR1)[i % 2]
        processes[i % 4].send_signal(number)
        now = check_stopped(folder, processes, number, 30)
        assert now > at
        at = now
    last = f"--config.steps={at + 5}"
    assert ended(start(4, last), 300) == [0] * 4
    assert ended(start(4, last, f"--config.run_dir={whole}"), 300) == [0] * 4
    ours, theirs = (flatten(read_parameters(run, at + 5)) for run in (folder / "run", whole))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ten_signals_to_a_single_process(folder, start, number):
    at = 0
    for _ in range(10):
        processes = start(1)
        wait_for_step(folder, processes, at + 2)
        processes[0].send_signal(number)
        at = check_stopped(folder, processes, number, 10)


@pytest.mark.slow
def test_a_closed_terminal_saves(folder, start):
    """Nobody reads standard error any more: the run goes on, until SIGHUP saves and ends it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the suite itself was started by nohup
    (process,) = start(1, closed=True)
    signal.signal(signal.SIGHUP, before)
    wait_for_step(folder, [process], 3)
    process.send_signal(signal.SIGHUP)
    assert ended([process], 30) == [75]
    assert latest_step(folder / "run") == steps(folder)[-1] >= 3


@pytest.mark.slow
def test_ctrl_c_saves_once_and_leaves_twice(folder, start):
    (process,) = start(1)
    wait_for_step(folder, [process], 2)
    process.send_signal(signal.SIGINT)
    assert ended([process], 30) == [130]
    at = latest_step(folder / "run")
    assert f"stopped by Ctrl-C at step {at} of" in said([process])[0][0]
    (process,) = start(1)
    wait_for_step(folder, [process], at + 2)
    process.send_signal(signal.SIGSTOP)  # so that both are there before it does anything
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert ended([process], 10) == [130]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_signal_before_the_first_step_ends_all_at_once(folder, start, count, tmp_path):
    """While they compile: nothing is saved, and nothing is lost."""
    processes = start(count, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "empty"))
    end = time.monotonic() + 120
    while not (folder / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.05)
    processes[-1].send_signal(signal.SIGTERM)
    assert ended(processes, 30) == [75] * count, said(processes)
    assert latest_step(folder / "run") is None and "nothing is lost" in said(processes)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "seconds"), [(0, 20), (1, 25)])
def test_the_death_of_one_is_one_line_of_the_others(folder, start, victim, seconds):
    processes = start(4)
    wait_for_step(folder, processes, 3)
    processes[victim].kill()
    others = [process for process in processes if process is not processes[victim]]
    assert ended(others, seconds) == [76] * 3
    for process in others:
        process.errors.seek(0)
        text = process.errors.read()
        lines = [line for line in text.splitlines() if "is lost" in line]
        assert len(lines) == 1 and f"process {victim} " in lines[0], text
        assert "Traceback" not in text and "*** Check failure" not in text and "@     0x" not in text


def numbers(run_dir):
    """Loss and gradient norm of each step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return np.array([[row["loss"], row["grad_norm"]] for row in rows if "loss" in row])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_goes_on_with_one_slice_after_the_other_was_lost(folder, start, victim):
    """Two groups of two processes stand for two slices of two hosts. One group dies, the other names it and ends, and
    two processes resume the run with the mesh of one slice, as a single device would have trained."""
    steps = ["--config.steps=16", "--config.checkpoint_every=4", "--config.cpu_devices=1"]
    processes = start(4, *steps, "--config.mesh_dim=2,2,1,1", TROUBLE="slow", MEGASCALE_NUM_SLICES="2")
    wait_for_step(folder, processes, 9)
    for process in processes[2 * victim : 2 * victim + 2]:
        process.kill()
    others = processes[2 * (1 - victim) :][:2]
    assert ended(others, 25) == [76] * 2
    # Process 0 has the messages of all: when it dies, the others hear of no other process.
    gone = r"process 2 \(slice 1, host 0, .*\), process 3 \(slice 1, host 1, .*\) are lost"
    for (line,) in said(others):
        assert re.search(gone if victim == 1 else r"process 0 \(slice 0, host 0\) at \S+ is lost", line), line
    saved = latest_step(folder / "run")
    assert saved is not None and 4 <= saved < 16

    resumed = start(2, *steps, "--config.mesh_dim=1,2,1,1")
    assert ended(resumed, 120) == [0] * 2, said(resumed)
    one = "--config.mesh_dim=1,1,1,1"
    alone = start(1, *steps, one, f"--config.run_dir={folder}/alone")
    other_seed = start(1, *steps, one, f"--config.run_dir={folder}/other", "--config.seed=1")
    assert ended(alone + other_seed, 120) == [0] * 2, said(alone + other_seed)
    ours = numbers(folder / "run")
    assert len(ours) == 16
    np.testing.assert_allclose(ours, numbers(folder / "alone"), rtol=1e-6)
    assert np.abs(ours / numbers(folder / "other") - 1).max() > 1e-3, "another seed would show"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named(folder, start, victim):
    processes = start(2)
    wait_for_step(folder, processes, 3)
    time.sleep(3)  # a process says every second what it does; silence while it compiles is allowed for longer
    processes[victim].send_signal(signal.SIGSTOP)
    assert ended([processes[1 - victim]], 40) == [76]
    (line,) = said(processes)[1 - victim]
    assert f"process {victim} " in line and "is lost: no message for" in line
    processes[victim].send_signal(signal.SIGCONT)
    assert ended([processes[victim]], 60) == [76]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_stuck_process_ends_within_its_limit(folder, start, count):
    """Its main thread hangs in a batch of its data; the others wait for it in a step."""
    processes = start(count, "--config.step_minutes=0.1", TROUBLE="stuck", OF=str(count - 1))
    wait_for_step(folder, processes, 3)
    assert ended(processes, 40) == [76] * count, said(processes)
    stacks = (folder / "run" / "logs" / f"process-{count - 1}.txt").read_text()
    assert "stuck_iterate" in stacks
    for lines in said(processes):
        (line,) = lines
        assert "process 1 (" in line if count > 1 else "takes longer than step_minutes" in line, line
        assert "the batch of step 5" in line


@pytest.mark.slow
def test_an_error_of_one_ends_all_with_its_code(folder, start):
    """Of process 1 alone, while it begins; process 0 has come that far, and would wait for it."""
    processes = start(2, TROUBLE="refused", OF="1")
    assert ended(processes, 120) == [2, 2]
    assert "process 1 of 2: its disk is another" in said(processes)[1][0]
    assert "process 1 ended: its disk is another" in said(processes)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["0", "1"])
def test_a_report_that_fails_on_one_of_two_processes_loses_no_step(folder, start, of):
    """Nothing is due to be saved: both stop at the same step, and the same command goes on."""
    processes = start(2, TROUBLE="report", OF=of)
    assert ended(processes, 120) == [75, 75], said(processes)
    at = latest_step(folder / "run")
    (line,) = said(processes)[0]
    failed = rf"the host of process {of} failed after step (\d+) \(OSError: \[Errno 28\] No space left on device; .*"
    found = re.search(failed + rf"stopped at step {at} of 100000, which is saved in .*: the same command resumes", line)
    assert found and 7 <= int(found[1]) <= at, line
    assert steps(folder) == list(range(1, at + 1))
    assert ended(start(2, f"--config.steps={at + 2}"), 120) == [0, 0]
    assert steps(folder) == list(range(1, at + 3))


@pytest.mark.slow
@pytest.mark.parametrize("of", ["0", "1"])
@pytest.mark.parametrize("trouble", ["input", "evaluation"])
def test_what_one_of_two_processes_cannot_take_part_in_ends_both_at_the_last_save(folder, start, trouble, of):
    """The evaluation of step 12, or the batch of step 13: the steps since step 10 are lost, and both say so. If it
    fails so again, neither is started again."""
    often = ["--config.checkpoint_every=5", "--config.eval_every=6", "--config.data.held_out=0.2"]
    for code, way_on in (
        (76, "the same command resumes the run"),
        (1, "it failed so before, and is not started again"),
    ):
        processes = start(2, *often, TROUBLE=trouble, OF=of)
        assert ended(processes, 120) == [code] * 2, said(processes)
        assert latest_step(folder / "run") == 10
        for (line,) in said(processes):
            assert f"the host of process {of} failed after step 12 (OSError: [Errno 5] Input/output error;" in line
            assert "and the 2 steps since step 10 are lost" in line and way_on in line
    assert json.loads((folder / "run" / "host_failure.json").read_text())["step"] == 12
    last = "--config.steps=14"
    assert ended(start(2, *often, last), 120) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("damage", ["overwritten", "cut"])
def test_a_store_that_changes_under_a_run_ends_all_its_processes(folder, start, damage, count):
    """With 2, which no launch script starts again; a single process saves the steps before."""
    processes = start(count, "--config.checkpoint_every=5")
    wait_for_step(folder, processes, 12)
    tokens = folder / "store" / "train" / "tokens.bin"
    if damage == "cut":
        os.truncate(tokens, 100)
    else:
        with tokens.open("r+b") as file:
            file.write(bytes(tokens.stat().st_size))
    assert ended(processes, 60) == [2] * count, said(processes)
    lines = "\n".join(line for lines in said(processes) for line in lines)
    changed = r"train/tokens\.bin has changed since .* No step up to (\d+) was trained on it, .* from step (\d+)"
    found = re.search(changed, lines)
    assert found and latest_step(folder / "run") == int(found[2]), lines
    assert found[1] == found[2] if count == 1 else int(found[1]) - 5 <= int(found[2]) <= int(found[1])
