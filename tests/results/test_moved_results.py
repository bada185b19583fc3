"""Each result names its commit, and those whose closed form has moved since are listed."""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moved_results import FOLDER, moved, rows
from ringformer.processes import software

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results").glob("*.json"))
BY_PROGRAM = ROOT / "results" / "kernel_matrix.json"
"""File whose rows have the hash of a program instead of a commit."""
COMMAND = (
    "ringformer estimate --model=llama_7b --target=v5e-16 --mesh_dim=1,1,1,16 --seq_len=65536 --generate_code --json"
)


def dated(entry: Any) -> Iterator[dict]:
    """Yield every object of a file that has a date."""
    inside: Iterable[Any] = ()
    if isinstance(entry, list):
        inside = entry
    if isinstance(entry, dict):
        inside = entry.values()
        if "date" in entry:
            yield entry
    for item in inside:
        yield from dated(item)


@pytest.mark.results
@pytest.mark.parametrize("path", [path for path in FILES if path != BY_PROGRAM], ids=lambda path: path.name)
def test_whatever_has_a_date_has_a_commit(path):
    entries = list(dated(json.loads(path.read_text())))
    assert entries or path.name == "convert_memory.json"
    assert all(re.fullmatch(r"[0-9a-f]{8,40}\+?|ringformer \S+", entry["commit"]) for entry in entries)


@pytest.mark.results
def test_compiled_steps_have_the_closed_form_of_their_commit(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = {row.name.split("/")[0] for row in rows(FOLDER)}
    assert {"stages.json", "plans.json", "kernel_steps.json", "table4.json", "table5.json"} <= files


def test_what_has_moved_by_more_than_5_percent_is_listed(tmp_path):
    made = {"date": "2026-11-20", "commit": "0123456789ab"}
    (tmp_path / "a.json").write_text(
        json.dumps({"cells": {"x": [{"command": COMMAND, "closed_form_seconds": 1.0, **made}]}})
    )
    (first,) = moved(tmp_path)
    now = first.now
    assert str(first) == f"a.json/cells/x[0] (2026-11-20, 0123456789ab): closed form 1 -> {now:.4g} s, {now - 1:+.0%}"
    entries = [{"command": COMMAND, "closed_form_seconds": now * share, **made} for share in (1.0, 0.96, 0.94, 1.07)]
    (tmp_path / "a.json").write_text(json.dumps(entries))
    assert [each.row.name for each in moved(tmp_path)] == ["a.json[3]", "a.json[2]"]


def test_a_command_that_no_longer_works_is_an_error(tmp_path):
    made = {"date": "2026-11-20", "commit": "0123456789ab"}
    entry = {"command": COMMAND + " --no_such_flag", "closed_form_seconds": 1.0, **made}
    (tmp_path / "a.json").write_text(json.dumps(entry))
    with pytest.raises(RuntimeError, match=r"--no_such_flag --closed_form ends with 2: .*no option --no_such_flag"):
        moved(tmp_path)


def test_a_revision_is_a_commit_that_says_whether_the_code_has_changed(tmp_path, monkeypatch):
    folder = tmp_path / "ringformer"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(software.ringformer, "__file__", str(folder / "__init__.py"))
    assert software.revision.__wrapped__().startswith("ringformer ")

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    assert re.fullmatch("[0-9a-f]{12}", software.revision.__wrapped__())
    (tmp_path / "notes").write_text("not code")
    assert not software.revision.__wrapped__().endswith("+")
    (folder / "a.py").write_text("")
    assert software.revision.__wrapped__().endswith("+")
    monkeypatch.setenv("PATH", "")  # no git
    assert software.revision.__wrapped__().startswith("ringformer ")
