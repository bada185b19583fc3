"""The README's Python snippets, each pasted into a fresh interpreter on a machine with one CPU device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import dense
from tests.helpers import relative_error

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_both_ways_to_use_the_op_are_shown():
    used = [re.findall(r"\b\w*ring_attention(?=\()", snippet) for snippet in SNIPPETS]
    assert used == [["sharded_ring_attention"], ["ring_attention"]]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_is_dense_attention_in_natural_order(snippet, tmp_path):
    """It runs as it stands, over a ring of eight, and its o is that of dense attention to its q, k and v."""
    names = ["q", "k", "v", "o"] + ["segment_ids"] * ("segment_ids" in snippet)
    save = f"import numpy\nnumpy.savez('arrays.npz', n=mesh.shape['sp'], {', '.join(f'{x}={x}' for x in names)})\n"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(README.parent),
                                "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # fmt: skip
    command = [sys.executable, "-W", "error", "-c", snippet + save]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "arrays.npz")
    assert found["n"] == 8
    ids = (found["segment_ids"],) * 2 if "segment_ids" in found else None
    assert relative_error(found["o"], dense.attention(found, segment_ids=ids)["o"]) <= 1e-5
