"""Tests for benchmarks/gpu.py: what it refuses before it measures."""

import sys

import pytest

from benchmarks import gpu


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target=nonsense"], "unknown target 'nonsense'; known: "),
        (["--target="], "unknown target ''; known: "),
        (["--out="], "--out= names no file"),
        (["--missing"], "--missing adds to measurements: give their file with --out"),
        (["--missing", "--out=none.json"], "--missing adds to measurements: give their file with --out"),
        (["--out=."], "--out=. is a folder"),
        (["--out=none/gpu.json"], "there is no folder none"),
        (["--out=/proc/gpu.json"], "--out=/proc/gpu.json cannot be written"),
    ],
)
def test_what_is_refused_before_it_measures(arguments, message, tmp_path, monkeypatch, capsys):
    def part(*_):
        raise AssertionError("it measures")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "_part", part)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    said = capsys.readouterr().err
    assert said.startswith("gpu.py: ") and message in said and said.count("\n") == 1
