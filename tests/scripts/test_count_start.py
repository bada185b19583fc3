"""The count of what a start of `train` enters before its first step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_start_is_counted():
    command = [sys.executable, str(ROOT / "scripts" / "count_start.py"), "--verbose"]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts, _, listed = done.stdout.partition("\n}")
    numbers = json.loads(counts + "}")
    assert numbers["functions"] == listed.count("\n       entered ") > 50 and numbers["calls of check_run"] == 1
    assert numbers["calls of them"] > numbers["functions of prepare with a config"] > 10
