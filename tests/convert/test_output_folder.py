"""A conversion that is killed leaves nothing that the next one does not remove."""

import signal
import subprocess
import sys

import pytest

from ringformer.convert.output_folder import output_folder

IS_KILLED = """
import os, signal, sys
from pathlib import Path
from ringformer.convert.output_folder import output_folder

with output_folder(Path(sys.argv[1]), []) as building:
    (building / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", IS_KILLED, str(out)], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        left = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
        assert left == ["out.building"], "one, of the last conversion"
    with output_folder(out, []) as building:
        (building / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space left"), output_folder(tmp_path / "out", []):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_of_two_conversions_the_slower_changes_nothing(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OSError, match="not empty"), output_folder(out, []) as slower:
        (slower / "config.json").write_text("slower")
        with output_folder(out, []) as faster:
            (faster / "config.json").write_text("faster")
    assert (out / "config.json").read_text() == "faster"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
