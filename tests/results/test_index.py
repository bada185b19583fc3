"""results/README.md lists what is there, by which command, and calls pending what is not."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+\.json)` \| (.+) \| (.+) \| (?:`(.+)`|in the file) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "results" / "README.md").read_text())


def test_every_file_has_a_row():
    there = {path.name for path in (ROOT / "results").glob("*.json")}
    assert there == {name for name, _, how, _ in ROWS if "pending" not in how}
    assert [name for name, *_ in ROWS] == sorted(name for name, *_ in ROWS)


@pytest.mark.parametrize(("name", "what", "how", "command"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_true(name, what, how, command):
    del what
    for word in command.split():
        assert not word.startswith(("benchmarks/", "experiments/", "scripts/")) or (ROOT / word).is_file()
    if "pending" in how:
        return
    said = json.loads((ROOT / "results" / name).read_text())
    told = said.get("command") or str(said.get("commands", command))
    assert command in told
    if "what" in said:
        assert said["what"].split(":")[0].split(" ")[0] == how.split(",")[0]
