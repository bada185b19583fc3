"""scripts/chaos.sh: what it calls ok is, and what went wrong it calls so; its record counts what went wrong."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import reliability
from scripts import chaos, chaos_outputs, chaos_runs
from tests.cpu_flags import cpu_environment

ROOT = Path(__file__).parent.parent.parent
FILE = Path("checkpoints/20/default/params.embed/0.0")


class FakeRuns(chaos_runs.Runs):
    """A start ends with `code`, says `said`, and comes to `outcome`."""

    def __init__(self, code, said, outcome):
        self._ended, self._reached, self._undisturbed = (code, said), outcome, "as undisturbed"
        self._folder = Path("folder")

    def launch(self, *words, **environment):
        return words

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
    assert verdict in chaos_runs.verdict_of(lambda: FakeRuns(code, said, outcome).damaged("run", FILE))


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
    assert verdict in chaos_runs.verdict_of(lambda: FakeRuns(code, "finished", outcome).damaged("run", file))


@pytest.mark.parametrize(
    ("code", "outcome", "verdict"),
    [(0, "as undisturbed", "ok"), (0, "another", "are not those of"), (76, "as undisturbed", "exit code 76")],
)
def test_a_run_must_go_on_to_the_same(code, outcome, verdict):
    assert verdict in chaos_runs.verdict_of(lambda: FakeRuns(code, "", outcome).goes_on("run"))


@pytest.mark.parametrize(
    ("code", "message", "saved", "reported", "verdict"),
    [
        (75, "stopped at step 7 of 40", {7}, 7, "ok"),
        (0, "stopped at step 7 of 40", {7}, 7, "exit code 0, not 75"),
        (75, "stopped at step 5 of 40", {7}, 7, "does not say that it stopped at a step of [7, 8]"),
        (75, "stopped", {7}, 7, "does not say that it stopped at a step of [7, 8]"),
        (75, "stopped at step 7 of 40", {5}, 7, "step 7 is not saved"),
        (75, "stopped at step 7 of 40", {7}, 6, "not the last one in its metrics"),
    ],
)
def test_an_error_of_the_host_must_save_its_step(monkeypatch, code, message, saved, reported, verdict):
    runs = FakeRuns(code, message, "as undisturbed")
    monkeypatch.setattr(runs, "saved", lambda name, step: step in saved)
    monkeypatch.setattr(runs, "reported", lambda name: reported)
    monkeypatch.setattr(runs, "goes_on", lambda name: None)
    assert verdict in chaos_runs.verdict_of(lambda: chaos.fails_and_resumes(runs, "run", "report", 7, [7, 8]))


class WritingRuns(FakeRuns):
    """Every command writes these files."""

    def __init__(self, code, message, files):
        super().__init__(code, message, "nothing")
        self._files = files

    def wait(self, process):
        for file, text in self._files.items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return super().wait(process)


@pytest.mark.parametrize(
    ("code", "message", "written", "verdict"),
    [
        (2, "{out} is not ours\n", {}, "ok"),
        (0, "{out} is not ours\n", {}, "exit code 0"),
        (2, "Traceback\n{out} is not ours\n", {}, "not one line"),
        (2, "no word\n", {}, "not one line"),
        (2, "{out} is not ours\n", {"out.jsonl": "ours"}, "has changed"),
        (2, "{out} is not ours\n", {"out.jsonl.made_by.json": "ours"}, "has changed"),
    ],
)
def test_a_refusal_is_one_line_and_changes_no_byte(tmp_path, code, message, written, verdict):
    out = tmp_path / "out.jsonl"
    out.write_text("theirs")
    runs = WritingRuns(code, message.format(out=out), {tmp_path / name: text for name, text in written.items()})
    assert verdict in chaos_runs.verdict_of(lambda: chaos_outputs.refuses(runs, [], out))


@pytest.mark.parametrize(("written", "verdict"), [("whole", "ok"), ("who", "is not what an uninterrupted command")])
def test_answers_must_be_those_of_an_uninterrupted_command(tmp_path, written, verdict):
    whole = tmp_path / "whole" / "out.jsonl"
    out = tmp_path / "killed" / "out.jsonl"
    whole.parent.mkdir()
    whole.write_text("whole")
    runs = WritingRuns(0, "", {out: written})
    assert verdict in chaos_runs.verdict_of(lambda: chaos_outputs.completes(runs, [], out, whole))


@pytest.mark.parametrize(
    ("left", "written", "verdict"),
    [
        ({}, "whole", "ok"),
        ({"out/a": "whole"}, "whole", "ok"),
        ({"out/a": "who"}, "whole", "is not what an uninterrupted command"),
        ({}, "who", "is not what an uninterrupted command"),
        ({"out.building-12345678/out/a": "who"}, "whole", "out.building-12345678 is left"),
    ],
)
def test_a_killed_conversion_must_leave_all_or_nothing(tmp_path, left, written, verdict):
    for name, text in {"whole/a": "whole", **left}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    runs = WritingRuns(0, "", {out / "a": written})
    assert verdict in chaos_runs.verdict_of(lambda: chaos_outputs.converts(runs, [], out, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        (2, "store/eval/tok\nens.bin is damaged", "ok"),
        (0, "store/eval/tokens.bin is damaged", "exit code 0"),
        (2, "Traceback", "no word of"),
    ],
)
def test_a_damaged_store_must_be_refused_by_name(code, message, verdict):
    file = Path("store/eval/tokens.bin")
    runs = FakeRuns(code, message, "nothing")
    assert verdict in chaos_runs.verdict_of(lambda: chaos_outputs.names_damage(runs, Path("store"), file))


def test_one_bit_is_flipped_and_mended(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"ring")
    empty = tmp_path / "empty"
    empty.touch()
    with chaos_runs.flipped_bit([tmp_path, empty, file], random.Random(0)) as (flipped, bit):
        changed = int.from_bytes(b"ring", "little") ^ int.from_bytes(file.read_bytes(), "little")
        assert flipped == file and changed == 1 << bit
    assert file.read_bytes() == b"ring"


def test_an_outcome_is_of_every_step_and_byte(tmp_path):
    runs = object.__new__(chaos_runs.Runs)
    runs._folder = tmp_path
    tree = tmp_path / "run" / "checkpoints" / str(chaos_runs.STEPS) / "default"
    (tree / "params.embed").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n{"step": 2')
    with pytest.raises(chaos_runs.Wrong, match="has no arrays"):
        runs._outcome("run")
    (tree / "params.embed" / "0.0").write_bytes(b"ab")
    assert runs._outcome("run") == ([(1, 2.0, 1.0)], {"params.embed/0.0": b"ab"})


@pytest.mark.usual("options0--1 is no number of trials")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kills=-1"], "-1 is no number of trials"),
        (["--others=few"], "few is no number of trials"),
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
        "--others=2",
        f"--results={tmp_path}/x.json",
    ]
    environment = cpu_environment(RINGFORMER_PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "x.json").read_text())["trials"]
    assert len(trials) == 22 and {row["verdict"] for row in trials} == {"ok"}
    assert done.stdout.endswith("22 trials, 0 of them wrong\n")
