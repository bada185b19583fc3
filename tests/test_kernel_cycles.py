"""Tests for benchmarks/kernel_cycles.py: where it writes, and what it refuses before it counts."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import kernel_cycles

ROOT = Path(__file__).parents[1]
KNOWN = (ROOT / "results" / "kernel_cycles.json").read_text()
PAGE = (ROOT / "docs" / "performance.md").read_text()
OUT = "results/kernel_cycles.json"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A working folder with the committed file and its page."""
    monkeypatch.chdir(tmp_path)
    for name, text in ((OUT, KNOWN), ("docs/performance.md", PAGE)):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    return tmp_path


@pytest.fixture
def counted(monkeypatch):
    """The targets that are counted, each with what the committed file says of it; nothing is compiled."""
    found = []

    def count(kind):
        def known(generation, *_):
            found.append((kind, generation))
            return json.loads(KNOWN)["targets"][generation][kind]

        return known

    monkeypatch.setattr(kernel_cycles, "rows", count("rows"))
    monkeypatch.setattr(kernel_cycles, "rings", count("rings"))
    monkeypatch.setattr(kernel_cycles, "compiled_by", lambda target: "nothing")
    return found


def run(monkeypatch, *arguments):
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["kernel_cycles.py", *arguments])
    try:
        kernel_cycles.main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("out", [[], [f"--out={OUT}"], [f"--out=./docs/../{OUT}"]])
def test_the_page_is_written_from_the_default_file(out, clone, counted, monkeypatch):
    page = clone / "docs" / "performance.md"
    page.write_text(PAGE.replace("ideal as a share", "of old"))
    assert run(monkeypatch, "--target=v5e", *out) == 0
    assert page.read_text().count("ideal as a share") and counted == [("rows", "v5e")]


def test_another_file_leaves_the_page_as_it_is(clone, counted, monkeypatch, capsys):
    assert run(monkeypatch, "--target=v5e", "--out=other.json") == 0
    assert list(json.loads((clone / "other.json").read_text())["targets"]) == ["v5e"]
    assert (clone / "docs" / "performance.md").read_text() == PAGE
    assert "docs/performance.md stays as it is" in capsys.readouterr().out


@pytest.mark.parametrize(("of_rings", "kind"), [([], "rows"), (["--ring"], "rings")])
def test_one_kernel_is_counted_anew_and_the_others_stay(of_rings, kind, clone, counted, monkeypatch):
    before = json.loads(KNOWN)["targets"]["v5e"][kind]
    monkeypatch.setattr(
        kernel_cycles, kind, lambda _, kernels: [row | {"new": 1} for row in before if row["kernel"] in kernels]
    )
    assert run(monkeypatch, "--target=v5e", "--kernel=xla", *of_rings) == 0
    after = json.loads((clone / OUT).read_text())["targets"]["v5e"][kind]
    assert after == [row | ({"new": 1} if row["kernel"] == "xla" else {}) for row in before]


def test_rings_are_counted_where_they_can_be(clone, counted, monkeypatch):
    assert run(monkeypatch, "--ring") == 0
    assert counted == [("rings", "v5e"), ("rings", "v5p")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ring", "--target=v4"], "--target=v4: rings are counted on v5e and v5p"),
        (["--ring", "--target=v6e-64"], "--target=v6e-64: rings are counted on v5e and v5p"),
        (["--ring", "--kernel=splash"], "--kernel=splash: of a ring pallas and xla are counted"),
        (["--target=v7"], "unknown target 'v7'"),
        (["--out="], "--out= names no place"),
        (["--out=docs"], "--out=docs is a folder"),
        (["--out=none/x.json"], "there is no folder none"),
        (["--out=/proc/x.json"], "--out=/proc/x.json: /proc keeps no files"),
        (["--docs=none.md"], "there is no such page"),
        (["--out=other.json", "--docs=docs/performance.md"], "a page is written from results/kernel_cycles.json alone"),
    ],
)
def test_what_is_refused_before_it_counts(arguments, message, clone, counted, monkeypatch, capsys):
    assert run(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("kernel_cycles.py: ") and message in said and said.count("\n") == 1
    assert not counted and not (clone / "other.json").exists()


@pytest.mark.parametrize(
    "content",
    [
        "garbage",
        "[]",
        '{"a": 1}',
        '{"targets": []}',
        '{"targets": {"v5e": 1}}',
        '{"targets": {"v5e": {"rows": [{}]}}}',
        '{"targets": {"v5e": {"rings": []}}}',
    ],
)
def test_a_damaged_file_is_named_before_it_counts(content, clone, counted, monkeypatch, capsys):
    (clone / OUT).write_text(content)
    assert run(monkeypatch, "--target=v5e") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kernel_cycles.py: {OUT} is no file of kernels' cycles (") and said.count("\n") == 1
    assert said.endswith(f"; delete it, or restore it: git checkout {OUT}\n")
    assert not counted and (clone / OUT).read_text() == content
