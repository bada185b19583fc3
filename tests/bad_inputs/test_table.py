"""Every bad input ends in one line, or is harmless. `-k NAME` runs one row."""

import io
import sys

import jaxtyping
import pytest

from tests.bad_inputs.rows import ROWS
from tests.bad_inputs.runner import faults_of, make_ready
from tests.bad_inputs.toys import make_toys


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder in which all rows run, with the folder `toys`."""
    folder = tmp_path_factory.mktemp("bad_inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        make_toys(folder)
    return folder


KINDS = (
    "deep",
    "levels",
    "99999",
    "seed",
    "num_processes",
    "model={}",
    "stages",
    "exit",
    "duplicate",
    "unused column",
    "huge id",
    "limit",
    "among checkpoints",
    "rope_theta",
    "current folder",
)
"""Parts of the names of inputs that once ended in a traceback, a hang or silence; all of these are in the usual
suite."""


def cells():
    """Yield all rows. An eighth of them, and those of KINDS, are in the usual suite; the others are slow."""
    for number, row in enumerate(ROWS):
        usual = number % 8 == 0 or any(kind in row.name for kind in KINDS)
        name = row.name.encode("ascii", "backslashreplace").decode()
        yield pytest.param(row, id=name, marks=[] if usual else pytest.mark.slow)


def test_names_are_unique_and_there_are_enough():
    """At least 300 rows."""
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) >= 300


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", list(cells()))
def test_row(row, base, monkeypatch, capfd, as_for_users):
    make_ready(row, base)
    monkeypatch.chdir(base)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(row.stdin)))
    for name, value in row.variables.items():
        monkeypatch.setenv(name, value)
    assert faults_of(row, base, capfd.readouterr) == []
