"""The runner fails on what it exists to find: controls, each with a command that does it."""

import sys
import time
from pathlib import Path

import pytest

from ringformer import cli
from tests.bad_inputs.runner import LONGEST, MOST_LINES, Row, faults_of, make_ready


@pytest.fixture
def faults(tmp_path, monkeypatch, capfd):
    """`faults(row, command)`: what the runner finds if `command` takes the place of ringformer's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "a").write_text("a")

    def find(row: Row, command) -> str:
        monkeypatch.setattr(cli, "main", command)
        make_ready(row, tmp_path)
        return "\n".join(faults_of(row, tmp_path, capfd.readouterr, seconds=0.2))

    return find


REFUSED = Row("refused", "train --x=3", "x=3 is wrong")


def says(text: str, code: int = 2):
    def command(words):
        print(text, file=sys.stderr)
        return code

    return command


def test_a_line_with_the_message_is_right(faults):
    assert faults(REFUSED, says("ringformer train: x=3 is wrong: choose another")) == ""


def test_a_traceback(faults):
    def command(words):
        return {}["x"]

    assert faults(REFUSED, command).startswith("a traceback: ") and "KeyError: 'x'" in faults(REFUSED, command)


def test_a_traceback_that_is_printed(faults):
    assert "a traceback" in faults(REFUSED, says("Traceback (most recent call last): x=3 is wrong"))


def test_an_end_of_the_process(faults):
    assert "a traceback" in faults(REFUSED, lambda words: sys.exit(0))


def test_a_hang_which_no_handler_of_errors_ends(faults):
    def command(words):
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    since = time.monotonic()
    assert "it hangs: it took more than 0.2 s" in faults(REFUSED, command)
    assert time.monotonic() - since < 30


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (says(""), "the message lacks 'x=3 is wrong'"),
        (says("ringformer train: y=4 is wrong"), "the message lacks 'x=3 is wrong'"),
        (says("x=3 is wrong", code=0), "exit code 0, expected 2"),
        (says("x=3 is wrong", code=1), "exit code 1, expected 2"),
        (says("x=3 is wrong" + "\n" * MOST_LINES), f"the message has {MOST_LINES + 1} lines"),
        (says("x=3 is wrong" + "0" * LONGEST), "the message has 1 lines"),
    ],
)
def test_another_end_than_the_row_s(faults, command, fault):
    assert fault in faults(REFUSED, command)


def test_a_row_without_an_expectation_fails(faults):
    assert "the message lacks ''" in faults(Row("nothing", "train"), says("a line"))


def test_a_harmless_row_is_accepted(faults):
    row = Row("harmless", "train", harmless="nothing happens")
    assert faults(row, says("x", code=0)) == "" and "exit code 2, expected 0" in faults(row, says("x"))


def test_files_change_in_the_row_s_own_folder_alone(faults):
    def writer(path: str):
        def command(words):
            Path(path).write_text("b")
            return says("x=3 is wrong")(words)

        return command

    assert faults(REFUSED, writer("row/b")) == ""
    for path in ("toys/a", "toys/b", "b"):
        assert "it changed files" in faults(REFUSED, writer(path))
