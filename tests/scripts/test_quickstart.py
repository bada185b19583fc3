"""scripts/quickstart.py as a user sees it: its parts under their headings, and the text that it ends on."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ringformer.cli import main
from tests.scripts.launching import ROOT

pytestmark = pytest.mark.slow

SMALL = [
    "steps=3",
    "optimizer.warmup_steps=1",
    "seq_len=256",
    "batch_size=1",
    "eval_batches=1",
    "cpu_devices=2",
    "mesh_dim=1,1,1,2",
    "model.num_layers=1",
    "data.source=text:docs/**/*.md",
    "data.held_out=0.3",  # by hashes of the pages, which change: of twenty some are held out
]


class Shown(NamedTuple):
    """What the quickstart wrote: about the training, and of the trained model; where it did."""

    progress: str
    results: str
    run_dir: Path


def quickstart(folder: Path, *overrides: str) -> Shown:
    words = [f"run_dir={folder / 'run'}", f"data.store={folder / 'store'}", *overrides]
    command = [sys.executable, "scripts/quickstart.py", *(f"--config.{word}" for word in words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return Shown(done.stderr, done.stdout, folder / "run")


def ending(shown: Shown) -> tuple[list[str], str]:
    """The words of the command that stands last, and all text below it."""
    command, _, text = shown.results.rpartition("\n$ ")[2].partition("\n")
    return shlex.split(command), text


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("quickstart"), *SMALL)


def test_every_part_stands_under_its_heading(shown):
    """In a file of either stream: the lines of a training go to stderr, and so does what announces them."""
    found = re.findall(r"^(\d of 3): train at a context of (\d+)|^step (\d+/\d+) |^(prompt of) ", shown.progress, re.M)
    steps = [("", "", f"{step}/6", "") for step in range(1, 7)], [("", "", f"{step}/3", "") for step in range(1, 4)]
    heads = ("1 of 3", "32", "", ""), ("2 of 3", "256", "", "")
    assert found == [heads[0], *steps[0], heads[1], *steps[1], ("", "", "", "prompt of")]
    lines = shown.results.strip().splitlines()
    assert lines[0].startswith("3 of 3: the trained model with three kinds of attention")
    assert [line.split()[0] for line in lines[1:3]] == ["ring", "blockwise"]
    assert " of 3" not in "".join(lines[1:])


def test_steps_say_how_long_it_takes(shown):
    """All but the first, behind which the pace is not known, and the last."""
    rows = re.findall(r"^step (\d)/(\d)  .* tokens/s(.*)$", shown.progress, re.M)
    assert len(rows) == 9
    for step, last, left in rows:
        assert bool(re.fullmatch(r"  about \d:\d\d:\d\d left", left)) == (1 < int(step) < int(last)), (step, last, left)


def test_it_ends_on_what_the_command_above_prints(shown, capsys):
    """Nothing is shown that the trained model would not say to anybody who asks."""
    (program, *command), text = ending(shown)
    assert program == ".venv/bin/ringformer" and f"--run={shown.run_dir}" in command
    assert main(command) == 0
    assert capsys.readouterr().out == text != "\n"
    assert main([*command, "--seed=1"]) == 0
    assert capsys.readouterr().out != text


def test_the_summary_is_a_file_too(shown):
    summary = json.loads((shown.run_dir / "summary.json").read_text())
    assert json.dumps(summary, indent=1) in shown.results and (shown.run_dir / "loss.png").stat().st_size > 0
    assert summary["ring_vs_vanilla_max_rel_err"] < 1e-4


def test_it_ends_on_text(tmp_path):
    """The quickstart as it ships: five minutes of two cores."""
    shown = quickstart(tmp_path)
    _, text = ending(shown)
    print(text)  # for whoever looks with -s
    assert len(text) > 200
    assert sum(not character.isspace() for character in text) > 0.3 * len(text)
    assert json.loads((shown.run_dir / "summary.json").read_text())["bits_per_byte_after"] < 3
