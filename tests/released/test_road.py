"""The page from a folder of documents to a served model, walked with SmolLM2-135M-Instruct; and what stops the walk."""

import os
import subprocess
import sys

import pytest

from tests.released.road import FILES, ROOT, Road, Stopped, Texts, compare, write_documents


@pytest.mark.slow
def test_the_road_is_open(smol, tmp_path):
    command = [sys.executable, "-m", "tests.released.road", str(smol), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the road is open" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "expected", "message"),
    [
        (("data", "inspect", "absent"), {}, "exit code 2, must be 0: ringformer data inspect absent\n"),
        (("configs", "list"), {"shows": ("tiny_extension", "no such line")}, "no line matches 'no such line'"),
    ],
    ids=["it fails", "a line is absent"],
)
def test_a_fault_stops_the_road(tmp_path, command, expected, message):
    with pytest.raises(Stopped, match=message):
        Road(tmp_path).run(*command, **expected)


def test_a_forbidden_output_stops_the_road(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.released.road.FORBIDDEN", "quickstart")
    with pytest.raises(Stopped, match=r"it prints 'quickstart': ringformer configs list\n"):
        Road(tmp_path).run("configs", "list")


HERE = Texts(["a ring"], "keys")


@pytest.mark.parametrize(
    ("there", "of_base", "message"),
    [
        (HERE, Texts(["a ring"], "values"), None),
        (Texts(["a rung"], "keys"), Texts(["a ring"], "values"), "writes other texts"),
        (Texts(["a ring"], "values"), Texts(["a rung"], "keys"), "writes other texts"),
        (HERE, HERE, "the base writes the same texts"),
    ],
    ids=["equal", "another text", "another answer", "nothing trained"],
)
def test_texts_are_compared(there, of_base, message):
    if message is None:
        compare("export", HERE, there, of_base)
    else:
        with pytest.raises(Stopped, match=message):
            compare("export", HERE, there, of_base)


def test_there_are_two_hundred_documents(tmp_path):
    """The same ones each time."""
    contents = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        write_documents(folder)
        contents.append({p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert contents[0] == contents[1] and len(contents[0]) == FILES
    assert len({path.suffix for path in contents[0]}) == 5
