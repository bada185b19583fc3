"""The demo of finetuning, in its short form: every command of the path from a Hugging Face checkpoint to another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow  # two minutes; tests/convert/test_finetuning.py goes the same way without its script
def test_the_demo_of_finetuning_runs(tmp_path):
    """Its script stops at the first command that fails; verification and generation compare with transformers."""
    environment = os.environ | {"RINGFORMER_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", "scripts/demo_finetune.sh", "--short", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("verdict: the same model") == 2
    assert "the same 64 tokens from transformers and from ringformer" in done.stdout
    stages = json.loads((tmp_path / "demo" / "run" / "stages.json").read_text())
    assert [s["state"] for s in stages] == ["finished"] * 3
    assert stages[-1]["eval_loss_last"] < stages[0]["eval_loss_first"]
