"""The compiler's process: what its death is, and that it never outlives who asked for it."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringformer.estimate import targets
from ringformer.estimate.compiler_dump import CompilerFailure
from ringformer.estimate.compiler_process import compile_step_apart
from tests.estimate.test_compile_step import SHORT, workload
from tests.hlo import on_tpu


def test_a_compiler_that_dies_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(targets, "_installed", lambda module: True)
    with pytest.raises(CompilerFailure, match="ended with 1"):
        compile_step_apart(workload(SHORT))


@on_tpu
def test_what_the_process_refuses_is_refused_here():
    """Its ValueError is the caller's."""
    with pytest.raises(ValueError, match="needs 7 devices, there are 8"):
        compile_step_apart(workload(SHORT, mesh_dim="1,1,1,7"))


@on_tpu
def test_a_compilation_ends_with_who_asked_for_it():
    """Nobody waits for the compiler's process if the parent is killed: it ends by itself, and takes its files along."""
    script = "from tests.estimate.test_compile_step import *; estimate(LONG)"
    parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)

    def others():
        command = ["pgrep", "-s", str(parent.pid), "-fa", "estimate.compiler_process"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    wait_until(others)
    folder = Path(re.search(r"compiler_process (\S+) \d+$", others(), re.MULTILINE)[1])
    assert folder.exists()
    parent.kill()
    parent.wait()
    wait_until(lambda: not others())
    assert not folder.exists()


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
