"""scripts/chaos.sh: what it calls ok is, and what went wrong it calls so; its record counts what went wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import reliability
from scripts import chaos
from tests.cpu_flags import cpu_environment

ROOT = Path(__file__).parent.parent.parent
FILE = Path("checkpoints/20/default/params.embed/0.0")


class FakeRuns(chaos.Runs):
    """A start ends with `code`, says `said`, and comes to `outcome`."""

    def __init__(self, code, said, outcome):
        self._ended, self._reached, self._undisturbed = (code, said), outcome, "as undisturbed"

    def start(self, name):
        return name

    def wait(self, process):
        return self._ended

    def _outcome(self, name):
        return self._reached


@pytest.mark.parametrize(
    ("code", "said", "outcome", "verdict"),
    [
        (0, f"{FILE} is damaged", "as undisturbed", "ok"),
        (1, f"{FILE} is damaged", "nothing", "ok"),
        (0, "finished", "as undisturbed", "no word of"),
        (0, f"{FILE} is damaged", "another", "are not those of"),
        (1, "Traceback", "nothing", "no word of"),
    ],
)
def test_a_damaged_file_must_be_named_and_change_nothing(code, said, outcome, verdict):
    assert verdict in chaos._said(lambda: FakeRuns(code, said, outcome).damaged("run", FILE))


@pytest.mark.parametrize(
    ("outcome", "code", "verdict"),
    [
        ("as undisturbed", 0, "ok"),
        ("another", 0, "are not those of"),
        ("as undisturbed", 1, "no word of"),
    ],
)
def test_what_nothing_depends_on_may_be_damaged_without_a_word_if_all_is_the_same(outcome, code, verdict):
    file = Path("checkpoints/20/commit_success.txt")
    assert verdict in chaos._said(lambda: FakeRuns(code, "finished", outcome).damaged("run", file))


@pytest.mark.parametrize(
    ("code", "outcome", "verdict"),
    [(0, "as undisturbed", "ok"), (0, "another", "are not those of"), (76, "as undisturbed", "exit code 76")],
)
def test_a_run_must_go_on_to_the_same(code, outcome, verdict):
    assert verdict in chaos._said(lambda: FakeRuns(code, "", outcome).goes_on("run"))


def test_an_outcome_is_of_every_step_and_byte(tmp_path):
    runs = object.__new__(chaos.Runs)
    runs._folder = tmp_path
    tree = tmp_path / "run" / "checkpoints" / str(chaos.STEPS) / "default"
    (tree / "params.embed").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n{"step": 2')
    with pytest.raises(chaos.Wrong, match="has no arrays"):
        runs._outcome("run")
    (tree / "params.embed" / "0.0").write_bytes(b"ab")
    assert runs._outcome("run") == ([(1, 2.0, 1.0)], {"params.embed/0.0": b"ab"})


@pytest.mark.usual("options0--1 is no number of trials")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kills=-1"], "-1 is no number of trials"),
        (["--results=nowhere/x.json"], "there is no folder nowhere"),
        ([__file__], "is not an empty folder: name another one"),
        (["tests"], "is not an empty folder"),
    ],
)
def test_mistakes_are_told(options, message):
    done = subprocess.run([sys.executable, "scripts/chaos.py", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_the_record_is_of_the_tests_that_the_page_names(tmp_path):
    files = reliability.tests_of((ROOT / "docs" / "reliability.md").read_text())
    assert len(files) > 15 and all((ROOT / file).is_file() for file in files)
    assert {"tests/processes/test_supervisor.py", "tests/convert/test_damaged_models.py"} <= {*files}
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('x')\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c/dev/null",
        "--junitxml=x.xml",
        "test_three.py",
    ]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTEST_ADDOPTS": ""}, capture_output=True)
    found = {row["test"]: row["outcome"] for row in reliability.outcomes(tmp_path / "x.xml")}
    assert found == {
        f"test_three.py::test_{x}": how for x, how in zip("abc", ("passed", "failure", "skipped"), strict=True)
    }


@pytest.mark.slow
def test_some_trials_of_each_kind(tmp_path):
    command = [
        "bash",
        "scripts/chaos.sh",
        str(tmp_path / "work"),
        "--kills=2",
        "--flips=3",
        f"--results={tmp_path}/x.json",
    ]
    environment = cpu_environment(RINGFORMER_PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "x.json").read_text())["trials"]
    assert len(trials) == 8 and {row["verdict"] for row in trials} == {"ok"}
    assert done.stdout.endswith("8 trials, 0 of them wrong\n")
