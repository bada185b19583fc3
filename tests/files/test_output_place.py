"""Places for outputs are refused before any work, by every verb, if nothing could be kept there."""

import os
from pathlib import Path

import pytest

from ringformer.cli import main
from ringformer.files.output_place import check_output

ROOT = Path(__file__).parents[2]
LEFTOVER = "x.orbax-checkpoint-tmp"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run, a file, and a link to the run."""
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "file").write_text("a poem")
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = {
    "": "--out= names no place: name one",
    "gs://bucket/x": "mount",
    "file:/x": "file:/x is no folder: mount the bucket",
    "/proc/x": "/proc/x: /proc keeps no files",
    "/sys/kernel/x": "/sys/kernel/x: /sys keeps no files",
    "../../../../../../../../proc/x": "/proc keeps no files",
    LEFTOVER: "is deleted as a leftover; choose another name",
    f"{LEFTOVER}/below": "is deleted as a leftover; choose another name",
    "run/checkpoints/6": "is among the checkpoints of the run",
    "run/checkpoints/5/x.json": "is among the checkpoints of the run",
    "file/x": "file is not a folder",
    "file/x/y": "file is not a folder",
}


@pytest.mark.parametrize("place", REFUSED)
def test_a_place_that_keeps_nothing(folder, place):
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=r"^--out") as error:
        check_output(place, "--out")
    assert REFUSED[place] in str(error.value)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("place", ["x", "new/folder/x", "run/x", "other/checkpoints/x", "checkpoints", "/dev/shm/x"])
def test_a_place_that_keeps_it(folder, place):
    assert str(check_output(place, "--out")) == place


def test_a_folder_that_cannot_be_written_to(folder, monkeypatch):
    """As the system says; root may write to any folder."""
    monkeypatch.setattr(os, "access", lambda path, _: path != folder / "other")
    check_output("file2", "--out")
    with pytest.raises(ValueError, match="other cannot be written to"):
        check_output("other/x/y", "--out")


VERBS = {
    "generate": ["--run=none", "--prompt=a", "--save_session={}"],
    "eval lines": ["--run=none", "--lengths=1K", "--out={}"],
    "eval harness": ["--run=none", "--tasks=a", "--out={}"],
    "data tokenizer": ["--source=text:none", "--vocab_size=300", "--out={}"],
    "tables": ["--only=table1", "--out={}"],
    "configs copy": ["quickstart", "{}"],
    "train": [f"--config={ROOT / 'configs' / 'quickstart.py'}", "--config.run_dir={}"],
}
"""Verbs that write a folder, before they read anything."""


@pytest.mark.parametrize("place", ["gs://bucket/x", "/proc/x", "run/checkpoints/6", LEFTOVER])
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_refuse_it_in_one_line(folder, capsys, verb, place):
    words = [word.format(place) for word in VERBS[verb]]
    assert main([*verb.split(), *words]) == 2
    error = capsys.readouterr().err
    assert REFUSED[place].removeprefix(f"{place}: ") in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", ["generate", "eval lines", "eval harness"])
def test_an_empty_name_is_not_the_default(folder, capsys, verb):
    assert main([*verb.split(), *(word.format("") for word in VERBS[verb])]) == 2
    assert "= names no place: name one" in capsys.readouterr().err
