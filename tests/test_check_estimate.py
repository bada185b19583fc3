"""Tests for benchmarks/check_estimate.py: what it compares on a CPU, and what it says where it cannot."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.check_estimate import (
    AGREES,
    DISAGREES,
    NOT_COMPARED,
    Measured,
    check_shape,
    compare,
    other_versions,
    read_estimate,
)

ROOT = Path(__file__).parents[1]
SAID = {"target": "v5e-8", "argument_bytes": 10**9, "peak_bytes": 10**10, "step_seconds_model": 10.0}
FOUND = Measured("TPU v5 lite", 8, 10**9, 10**10, 9 * 10**9, [30.0, 11.0, 9.0], 2.0)


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        ({}, AGREES, None),
        ({"peak_bytes": None}, AGREES, "not compared"),
        ({"step_seconds": [13.0]}, DISAGREES, "MORE THAN SAID"),
        ({"step_seconds": [7.0]}, DISAGREES, "LESS THAN SAID"),
        ({"peak_bytes": 11 * 10**9}, DISAGREES, "MORE THAN SAID"),
        ({"planned_bytes": 11 * 10**9}, DISAGREES, "MORE THAN SAID"),
        ({"planned_bytes": 10**9, "argument_bytes": 10**8}, AGREES, None),
        ({"device_kind": "TPU v4"}, NOT_COMPARED, "not compared"),
        ({"devices": 4}, NOT_COMPARED, "not compared"),
        ({"device_kind": "cpu"}, NOT_COMPARED, "not compared"),
        ({"device_kind": "cpu", "argument_bytes": 2 * 10**9}, DISAGREES, "MORE THAN SAID"),
    ],
)
def test_verdicts(change, code, verdict):
    lines, found = compare(SAID, FOUND._replace(**change), tolerance=0.25)
    assert found == code
    assert verdict is None or verdict in {line.verdict for line in lines}


def test_another_version_is_said():
    import jax

    assert other_versions({"versions": {"jax": jax.__version__, "ringformer": "9"}}) == []
    assert other_versions({"versions": {"jax": "0.0.1", "libtpu-of-old": "3"}}) == [
        f"jax: the estimate is of 0.0.1, here is {jax.__version__}",
        "libtpu-of-old: the estimate is of 3, here is none",
    ]


def test_what_is_no_estimate_is_refused(tmp_path):
    file = tmp_path / "estimate.json"
    for text, message in (
        ("", "no output of"),
        ("FITS", "no output of"),
        ('{"target": "v5e-8"}', "has no argument_by"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_estimate(file, None)
    file.write_text(json.dumps(SAID) + "\n" + json.dumps(SAID | {"target": "v5e-16"}) + "\n")
    assert read_estimate(file, 2)["target"] == "v5e-16"
    with pytest.raises(ValueError, match="with a stage 3"):
        read_estimate(file, 3)


def test_an_estimate_of_another_step_is_refused():
    config = SimpleNamespace(seq_len=4096, batch_size=2, mesh_dim="1,1,1,8")
    check_shape(SAID | {"seq_len": 4096, "mesh_dim": "1,1,1,8"}, config)
    with pytest.raises(ValueError, match="the estimate is of seq_len=7, the config has 4096"):
        check_shape(SAID | {"seq_len": 7}, config)


@pytest.mark.slow
def test_on_a_cpu_the_steps_run_and_only_the_arguments_are_compared(tmp_path):
    """On eight simulated devices, with the config of the quickstart."""
    (tmp_path / "estimate.json").write_text(json.dumps(SAID))
    overrides = ["--config.mesh_dim=1,2,2,2", "--config.seq_len=256"]
    command = [sys.executable, "benchmarks/check_estimate.py", "--config=configs/quickstart.py", *overrides]
    command += [f"--estimate={tmp_path}/estimate.json", "--steps=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == NOT_COMPARED, done.stderr
    assert "NOT COMPARED: these are not the devices of the estimate" in done.stdout
    (arguments,) = (line for line in done.stdout.splitlines() if line.startswith("arguments"))
    assert "GiB (0." in arguments
    assert 5 < float(re.search(r"loss ([\d.]+);", done.stdout)[1]) < 8, "of random bytes, so many nats or a few more"
