"""Counts of scripts/measure_code.py, compared with a text counted by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.measure_code import main, measure, measure_file

ROOT = Path(__file__).parents[2]
TEXT = '''"""A file."""

import os  # a comment


class Ring:
    """A ring."""

    def hop(self, keys):
        """Move keys."""
        first, last = keys[0], keys[-1]
        return [key for key in keys] if first else {last: os}


def outer(n, *more, **options):
    def inner(x):
        y: int = x
        return y

    a, b = n
    with open(a) as file:
        total = sum(1 for _ in file)
    return inner(total)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "ring.py").write_text(TEXT)
    (tmp_path / "top.py").write_text("x = 1\n")
    return tmp_path


def test_a_file_s_numbers(folder):
    file = measure_file(folder / "room" / "ring.py", folder)
    assert (file.room, str(file.path)) == ("room", "room/ring.py")
    assert (file.comprehensions, file.conditional_expressions) == (2, 1)
    assert (file.assignments, file.parallel_assignments) == (3, 1)
    by_place = {function.place: function for function in file.functions}
    hop, outer, inner = (by_place[f"room/ring.py:{name}"] for name in ("hop", "outer", "inner"))
    assert (hop.lines, hop.names) == (4, 5)
    assert (outer.lines, outer.names) == (9, 11)
    assert (inner.lines, inner.names) == (3, 2)
    assert inner.tokens == 13  # def inner ( x ) : y : int = x return y


def test_comments_blank_lines_and_breaks_are_no_tokens(folder):
    path = folder / "top.py"
    before = measure_file(path, folder).tokens
    path.write_text("# a comment\n\nx = (\n    1\n)\n")
    assert (before, measure_file(path, folder).tokens) == (3, 5)


def test_rooms_add_up(folder, capsys):
    files = measure(folder)
    main([str(folder), "--largest=1"])
    out = capsys.readouterr().out
    tokens = sum(file.tokens for file in files)
    assert f"2; {tokens:,}" in out and "names bound in the fullest function" in out
    rooms = out.partition("without the rooms inside:\n")[2].partition("\n\n")[0]
    assert sum(int(line.split()[0]) for line in rooms.splitlines()) == tokens
    with pytest.raises(SystemExit):
        main([str(folder / "nothing")])


def test_the_package_is_measured_without_being_imported():
    command = [sys.executable, "-I", str(ROOT / "scripts" / "measure_code.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first = done.stdout.splitlines()[0]
    assert first.startswith("files; tokens") and int(first.split()[-1].replace(",", "")) > 100_000
