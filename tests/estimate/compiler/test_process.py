"""The compiler's process: what its death is, and that it never outlives who asked for it."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.programs import EVALUATION
from tests.estimate.test_programs import SHORT, workload
from tests.hlo import on_tpu

PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} negate(f32[8]{0} %x)
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 32, page 0, parameter 0, shape |f32[8]| at ShapeIndex {}:
allocation 1: size 32, page 0, maybe-live-out:
"""
ABORT = (
    "F1122 09:21:38.622704   30846 llo_loop.cc:175] Check failed: index_space_.start <= index_space_.limit (0 vs. -1)"
)

STAND_IN = f"""#!{sys.executable}
# Stands for the Python of the compiler's process: schedules a program if SCHEDULES says so, and dies.
import os, pickle, sys
from pathlib import Path
from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.program_seconds import Rates
from ringformer.estimate.compiler.program_estimate import Surroundings
folder = Path(sys.argv[3])
around = Surroundings("train step", Rates(1.0, Network((), 1.0), 1.0, 0.0), 1, state_bytes=1000, alive_bytes=100)
(folder / "surroundings").write_bytes(pickle.dumps(around))
(folder / "dump").mkdir()
name = "module_0000.jit_step.after_optimizations"
if "assignment" in os.environ["SCHEDULES"]:
    (folder / "dump" / f"{{name}}-buffer-assignment.txt").write_text({ASSIGNMENT!r})
if "program" in os.environ["SCHEDULES"]:
    (folder / "dump" / f"{{name}}_after_buffer_assignment.txt").write_text({PROGRAM!r})
elif "half" in os.environ["SCHEDULES"]:
    (folder / "dump" / f"{{name}}_after_buffer_assignment.txt").write_text({PROGRAM!r}[:-10])
print({ABORT!r}, flush=True)
os.abort()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A compiler that dumps what SCHEDULES names, and aborts at once."""
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(targets, "_installed", lambda module: True)


def test_a_compiler_that_dies_after_its_schedule_has_answered(stand_in, monkeypatch):
    """However soon: the answer does not depend on machine code that nobody asked for."""
    monkeypatch.setenv("SCHEDULES", "assignment program")
    e = compile_apart(workload(SHORT))
    assert e.fits and not e.generated_code and e.code_bytes is None
    assert (e.peak_bytes, e.argument_bytes, e.alive_bytes, e.state_bytes) == (164, 32, 100, 1000)


@pytest.mark.usual("assignment half")
@pytest.mark.parametrize("schedules", ["", "assignment", "assignment half"])
def test_a_compiler_that_dies_before_its_schedule_is_a_failure(stand_in, monkeypatch, schedules):
    monkeypatch.setenv("SCHEDULES", schedules)
    with pytest.raises(CompilerFailure, match=r"^train step: the compiler died"):
        compile_apart(workload(SHORT))


def test_a_compiler_that_dies_on_machine_code_is_a_failure(stand_in, monkeypatch):
    """Named, in a line, with what it died of and what to try."""
    monkeypatch.setenv("SCHEDULES", "assignment program")
    with pytest.raises(CompilerFailure) as failure:
        compile_apart(workload(SHORT), EVALUATION, generate_code=True)
    said = str(failure.value)
    assert said.startswith("evaluation: the compiler died (SIGABRT): llo_loop.cc:175] Check failed: index_space_")
    assert "half the sequence" in said and "\n" not in said


def test_a_process_that_cannot_begin_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(targets, "_installed", lambda module: True)
    with pytest.raises(CompilerFailure, match="exit code 1"):
        compile_apart(workload(SHORT))


@on_tpu
def test_what_the_process_refuses_is_refused_here():
    """Its ValueError is the caller's."""
    with pytest.raises(ValueError, match="needs 7 devices, there are 8"):
        compile_apart(workload(SHORT, mesh_dim="1,1,1,7"))


@on_tpu
def test_a_compilation_ends_with_who_asked_for_it():
    """Nobody waits for the compiler's process if the parent is killed: it ends by itself, and takes its files along."""
    script = "from tests.estimate.test_programs import *; estimate(LONG)"
    parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)

    def others():
        command = ["pgrep", "-s", str(parent.pid), "-fa", "estimate.compiler.process"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    wait_until(others)
    folder = Path(re.search(r"compiler\.process (\S+) \d+$", others(), re.MULTILINE)[1])
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
