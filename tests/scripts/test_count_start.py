"""A start stays short: functions and files between the command line and the first step."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.count_start import MOST

ROOT = Path(__file__).parents[2]


def test_a_start_stays_short():
    command = [sys.executable, str(ROOT / "scripts" / "count_start.py")]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts.keys() == MOST.keys() and {name: n for name, n in counts.items() if n > MOST[name]} == {}
    assert counts["functions"] > 50 and counts["calls of them"] > counts["functions of prepare with a config"] > 10
