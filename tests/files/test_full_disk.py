"""A disk that is full: one line names the place, and nothing half-written stays there."""

import numpy as np
import pytest

from ringformer.cli import main
from ringformer.files.atomic import naming, write_whole
from tests.convert.families import save_tiny


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for number in range(40):
        words = rng.choice(["ring", "block", "key", "query", "value"], 400)
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def models(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_tiny("qwen3", folder / "theirs")
    assert main(["convert", "from-hf", str(folder / "theirs"), str(folder / "ours")]) == 0
    return folder


@pytest.mark.parametrize("verb", ["prepare", "tokenizer", "from-hf", "to-hf"])
def test_a_full_disk_is_one_line_with_the_place(verb, texts, models, mounted, capsys):
    disk = mounted(16 * 1024)
    source = f"--source=text:{texts}/*.txt"
    out = disk / "out.model"
    commands = {
        "prepare": ["data", "prepare", source, f"--store={out}", "--tokenizer=bytes", "--held_out=0"],
        "tokenizer": ["data", "tokenizer", source, f"--out={out}", "--vocab_size=280"],
        "from-hf": ["convert", "from-hf", str(models / "theirs"), str(out)],
        "to-hf": ["convert", "to-hf", str(models / "ours"), str(out)],
    }
    if verb == "tokenizer":
        (disk / "ballast").write_bytes(bytes(16 * 1024))
    before = {path.name for path in disk.iterdir()}
    assert main(commands[verb]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in error and str(out) in error
    assert not out.exists() and {path.name for path in disk.iterdir()} - before <= {"out.model.part"}


def test_a_file_that_was_there_stays(mounted):
    disk = mounted(16 * 1024)
    write_whole(disk / "table.txt", "old")
    with pytest.raises(OSError, match=r"No space left on device: '.*table\.txt'"):
        write_whole(disk / "table.txt", bytes(20_000))
    assert (disk / "table.txt").read_text() == "old"


def test_an_error_that_names_a_file_keeps_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="/absent'"), naming(tmp_path / "other"):
        (tmp_path / "absent").read_text()
    with pytest.raises(TimeoutError, match="no answer"), naming(tmp_path / "other"):
        raise TimeoutError("no answer")
