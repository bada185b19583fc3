"""How a state begins: the same on every mesh, and on no device more than its part of it."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from ringformer.estimate.workloads.targets import find_target
from ringformer.models.decoder import Decoder
from ringformer.train.state import init_state, make_init
from tests.helpers import relative_error, unpadded
from tests.hlo import on_tpu
from tests.train.states import CONFIG, MESHES, OPTIMIZER, setup

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "state_memory.json"


@pytest.fixture(scope="module")
def models_own():
    """The parameters as the model alone, on one device, draws them from seed 5."""
    return nnx.to_pure_dict(jax.jit(lambda: nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(5))))())


@pytest.mark.usual("1,2,1,4", "1,1,2,3")
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_a_seed_means_the_same_on_every_mesh(mesh_dim, models_own):
    mesh, shardings = setup(mesh_dim)
    params = make_init(CONFIG, shardings.params, mesh, seed=5)()
    # Not bitwise: compilers may contract the scaling of a differently shaped shard differently, in the last bit.
    errors = jax.tree.map(relative_error, unpadded(params, shardings.params), models_own)
    assert max(jax.tree.leaves(errors)) < 1e-7
    assert all(x.sharding.shard_shape(x.shape) == x.addressable_shards[0].data.shape for x in jax.tree.leaves(params))
    for x, own in zip(jax.tree.leaves(params), jax.tree.leaves(models_own), strict=True):
        assert np.count_nonzero(x) == np.count_nonzero(own), "padding is zero"


def test_the_rest_of_a_first_state_is_zero():
    mesh, shardings = setup("1,2,1,4")
    state = init_state(CONFIG, OPTIMIZER, shardings, mesh, seed=5)
    assert not any(np.any(x) for x in jax.tree.leaves((state.step, state.opt_state)))


def check(row):
    assert row["padded_weights"] > 0
    assert row["allowed_bytes"] == row["state_bytes"] + max(row["two_layers_bytes"], row["largest_array_bytes"])
    assert row["first_state_peak_bytes"] >= row["state_bytes"]
    assert max(row["init_peak_bytes"], row["first_state_peak_bytes"]) <= row["allowed_bytes"]


def compiled(model: str, target: str, mesh_dim: str) -> dict:
    command = [sys.executable, "benchmarks/state_memory.py", "--case", model, target, mesh_dim]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize(
    ("target", "mesh_dim"),
    [("v5e-256", "1,1,1,256"), pytest.param("v4-1024", "1,1,1,512", marks=pytest.mark.slow)],
)
def test_a_3b_begins_in_little_more_than_its_state(target, mesh_dim):
    """Compiled. In fact far below what is allowed: a device draws its own shards alone."""
    row = compiled("llama_3b", target, mesh_dim)
    check(row)
    assert max(row["init_peak_bytes"], row["first_state_peak_bytes"]) <= 3 * row["state_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target", "mesh_dim"), [("llama_7b", "24xA100-80", "1,1,1,24"), ("llama2_70b", "96xA100-80", "1,1,1,96")]
)
def test_a_state_begins_on_gpus(model, target, mesh_dim):
    try:
        find_target(target).require_compiler()
    except ValueError as missing:
        pytest.skip(str(missing))
    row = compiled(model, target, mesh_dim)
    check(row)
    assert row["init_peak_bytes"] <= row["first_state_peak_bytes"] <= 1.01 * row["state_bytes"]


def test_what_is_committed():
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [(row["model"], row["target"]) for row in rows] == [
        ("llama_3b", "v5e-256"),
        ("llama_3b", "v4-1024"),
        ("llama_7b", "24xA100-80"),
        ("llama2_70b", "96xA100-80"),
    ]
    for row in rows:
        check(row)
