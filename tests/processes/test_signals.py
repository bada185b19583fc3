"""Signals are heard while the main thread is in C, and Ctrl-C from the first moments of the command on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringformer.processes.signals import SIGNALS, SignalThread

ROOT = Path(__file__).parent.parent.parent

HEARS = """
import os, signal, zlib
from ringformer.processes.signals import SignalThread

def heard(number):
    print(f"heard {signal.Signals(number).name}", flush=True)

data = os.urandom(1 << 20) * 60
with SignalThread(heard):
    print("busy", flush=True)
    zlib.compress(data, 9)  # seconds in C: Python's own handlers wait until it is back
    print("back", flush=True)
"""


def test_signals_are_heard_before_c_comes_back():
    with subprocess.Popen([sys.executable, "-c", HEARS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.1)
        for name in ("SIGUSR1", "SIGINT", "SIGTERM"):
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"heard {name}\n"
        assert process.stdout.readline() == "back\n"
        assert process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_ends_the_suite(tmp_path, workers):
    """A test trains in its own process when Ctrl-C reaches the process group. All processes end within seconds."""
    tests = "tests/train/test_exact_resume.py::test_the_losses_are_those_that_are_kept"
    command = [sys.executable, "-m", "pytest", f"-n{workers}", f"--basetemp={tmp_path}/tests", tests]
    with_default = ["env", "--default-signal=INT", *command]  # a shell ignores SIGINT in background jobs
    process = subprocess.Popen(
        with_default, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not any('"loss"' in path.read_text() for path in tmp_path.rglob("metrics.jsonl")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 15, output
    assert process.returncode == 2, output
    assert "KeyboardInterrupt" in output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with SignalThread(lambda _: None):
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_an_ignored_signal_stays_ignored():
    """As that of a closed terminal under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalThread(lambda _: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


CTRL_C = signal.SIGINT, 130, "Ctrl-C"


@pytest.mark.usual("15-75-SIGTERM-1.0", "10-75-SIGUSR1-1.0")
@pytest.mark.parametrize(
    ("number", "code", "name", "after"),
    [
        (*CTRL_C, 0.5),
        (*CTRL_C, 1.0),
        (*CTRL_C, 2.0),
        (signal.SIGTERM, 75, "SIGTERM", 1.0),
        (signal.SIGUSR1, 75, "SIGUSR1", 1.0),
        *(pytest.param(*CTRL_C, 0.4 + i / 5, marks=pytest.mark.slow) for i in range(10)),
    ],
)
def test_the_command_is_stopped_while_it_starts(tmp_path, number, code, name, after):
    """While it imports, makes a store, or compiles; each time with one line."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "ringformer.cli",
        "train",
        "--config=configs/quickstart.py",
        f"--config.run_dir={tmp_path}/run",
        f"--config.data.store={tmp_path}/store",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "ringformer.processes.signals" not in (line := process.stderr.readline()):
        assert line, "it ended"
    time.sleep(after)
    began = time.monotonic()
    process.send_signal(number)
    said = [line for line in process.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    assert process.returncode == code, said
    assert time.monotonic() - began < 10
    assert len([line for line in said if f"stopped by {name}" in line]) == 1, said
    assert "Traceback" not in "".join(said)
