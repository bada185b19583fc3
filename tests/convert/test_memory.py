"""A model of 150M parameters, 300 MB in float16: neither way takes the memory of a whole one, nor of one parameter."""

import json
import subprocess
import sys

import numpy as np
import pytest

from ringformer.convert.hf_config import to_hf_config
from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import write_tensors
from ringformer.models.families.llama import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_layers=7, num_heads=16, num_kv_heads=16, head_dim=64
)

PROGRAM = """
import resource, sys
import jax
from ringformer.convert import block_streams, from_hf, hf_weights, to_hf
hf_weights.BLOCK_BYTES, block_streams.CACHE_BYTES = 4 * 2**20, 2**24
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
verb, source, target = sys.argv[1:]
jax.devices()
before = peak()
from_hf(source, target) if verb == "from-hf" else to_hf(source, target, "float16")
print(peak() - before)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    plan = {name: w.tensor_shape for w in weights(CONFIG) for name in w.names}
    rng = np.random.default_rng(0)
    write_tensors(
        folder,
        plan,
        np.dtype(np.float16),
        10**9,
        lambda name: [rng.standard_normal(plan[name], np.float32).astype(np.float16)],
    )
    described = to_hf_config(CONFIG, max_position=2048, dtype="float16", token_ids={"eos_token_id": 2})
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def growth(verb, source, target) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, verb, source, target], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
def test_peak_memory_is_that_of_some_blocks(theirs, tmp_path):
    """The float32 parameters are 600 MB, the largest of them 117 MB."""
    size = (theirs / "model.safetensors").stat().st_size
    assert size > 290e6
    assert growth("from-hf", theirs, tmp_path / "ours") < 110e6
    assert growth("to-hf", tmp_path / "ours", tmp_path / "back") < 110e6
    assert (tmp_path / "back" / "model.safetensors").read_bytes()[-(10**6) :] == (
        theirs / "model.safetensors"
    ).read_bytes()[-(10**6) :]
