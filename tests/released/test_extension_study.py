"""The extension study, whole, at toy size: the released model, its theta, three steps, losses, tasks, chats, a ring."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments.extension.pack import write_tokens
from experiments.extension.plans import LINES, LONG, RELEASED, RINGS, THETA
from tests.released.folders import smol

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_study_goes_through(tmp_path):
    """By its script; run again, it repeats nothing, and its results are the same."""
    tokenizer = Tokenizer.from_file(str(smol() / "tokenizer.json"))
    texts = [path.read_text() for path in sorted((ROOT / "ringformer").rglob("*.py"))]
    documents = ["\n".join(texts[start::6]) for start in range(6)]
    ids = [np.array(encoding.ids[:4096]) for encoding in tokenizer.encode_batch(documents)]
    (tmp_path / "inputs").mkdir()
    write_tokens(tmp_path / "inputs" / "train.parquet", ids[:4])
    write_tokens(tmp_path / "inputs" / "held_out.parquet", ids[4:])
    files = f"--results={tmp_path}/results.json", f"--figure={tmp_path}/figure.png"
    command = ["bash", "experiments/extend_released.sh", "--toy", f"--inputs={tmp_path}/inputs", *files]
    options: dict = {"cwd": ROOT, "capture_output": True, "text": True}
    options["env"] = os.environ | {"RINGFORMER_PYTHON": sys.executable}
    done = subprocess.run([*command, str(tmp_path / "out")], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["toy"]
    assert list(found["losses"]) == [RELEASED, THETA, LONG]
    assert all(row["documents"] == 2 for rows in found["losses"].values() for row in rows)
    assert found["differences"][f"{THETA} - {RELEASED}"][-1]["nats"] > 0.05  # so near, a larger theta only costs
    (longer,) = found["longer"].values()
    for rows in longer["losses"].values():
        assert {row["documents"] for row in rows} == {1}
    of_tasks = {(row["task"], row["model"]) for row in found["tasks"]}
    assert of_tasks == set(product(("niah_multikey_2", LINES), (RELEASED, THETA, LONG)))
    assert [row["model"] for row in found["short_task"]] == [RELEASED, THETA, LONG]
    assert found["short_task"][0]["right"] >= 6  # of 8; a guess is right in a quarter
    one, ring = found["ring_step"]
    assert (one["devices"], ring["devices"]) == RINGS
    assert ring["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert ring["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5) and one["grad_norm"] > 0.1
    assert [row["model"] for row in found["chats"]] == [RELEASED, THETA, LONG]
    assert found["chats"][0]["right"] >= 12
    assert [row["steps"] for row in found["training"]] == [2, 2]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    again = subprocess.run([*command, str(tmp_path / "out")], **options)
    assert again.returncode == 0 and not re.search("^== ", again.stdout, re.MULTILINE), again.stdout
    assert json.loads((tmp_path / "results.json").read_text())["toy"] == found
