"""Sessions of a process that has JAX_ENABLE_X64=1, as users set it. Python numbers are then 64-bit, arrays are not."""

import json
import subprocess
import sys

import pytest

from tests.cpu_flags import cpu_environment

CASES = {
    "ring": (1e-4, {"float32", "int32"}),
    "windows": (1e-4, {"float32", "int32"}),
    "fork": (0.13, {"bool", "float32", "int32", "int8"}),
}
"""Largest error of a log-probability, as for sessions without x64 (`test_session.py`), and all dtypes."""


@pytest.mark.usual("windows")
@pytest.mark.parametrize("case", CASES)
def test_a_session_has_the_numbers_and_dtypes_that_it_has_without_x64(case):
    limit, dtypes = CASES[case]
    command = [sys.executable, "-m", "tests.inference.x64_sessions", case]
    done = subprocess.run(command, env=cpu_environment(JAX_ENABLE_X64="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["error"] <= limit
    assert set(found["dtypes"]) == dtypes
