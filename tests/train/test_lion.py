"""Lion is optax's, on shards and in host memory too; its state is one moment."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ringformer.estimate.closed_forms.training import offloaded_state, state_bytes
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from ringformer.parallel.mesh import make_mesh
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer, schedule
from ringformer.train.program import make_program
from ringformer.train.state import init_state
from tests.helpers import relative_error, unpadded
from tests.train.test_step import CONFIG, T
from tests.train.updates import batch_on

LION = OptimizerConfig(name="lion", learning_rate=3e-4, b2=0.99, weight_decay=0.5, warmup_steps=3)


def test_its_updates_are_those_of_optax():
    """Over 20 steps; signs of sums near 0 may differ with their rounding."""
    letters = {"w": "DF", "norm": "D"}
    ours = make_optimizer(LION, 100, letters)
    theirs = optax.lion(schedule(LION, 100), b1=LION.b1, b2=LION.b2, weight_decay=0.5, mask={"w": True, "norm": False})
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32), "norm": jnp.ones(64)}
    states = [ours.init(params), theirs.init(params)]
    both = [params, params]
    for _ in range(20):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), params)
        for i, optimizer in enumerate((ours, theirs)):
            updates, states[i] = optimizer.update(grads, states[i], both[i])
            both[i] = optax.apply_updates(both[i], updates)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, *both))) < 1e-6
    assert relative_error(both[0]["w"], params["w"]) > 1e-3
    assert jax.tree.map(jnp.shape, states[0][0]) == jax.tree.map(jnp.shape, states[1][0])


def trained(mesh_dim: str, devices: int, offload: str = "none") -> dict:
    mesh = make_mesh(mesh_dim, jax.devices()[:devices])
    program = make_program(CONFIG, mesh, replace(LION, offload=offload), steps=40, seq_len=T)
    state = init_state(CONFIG, program.optimizer, program.shardings, mesh, 0)
    for _ in range(20):
        state, _ = program.step(state, *batch_on(program))
    return unpadded(state.params, program.shardings.params)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "state"])
def test_a_ring_trains_as_one_device(offload):
    """Signs of gradients near 0 differ with their rounding, each by twice the learning rate."""
    expected, found = trained("1,1,1,1", 1), trained("1,2,2,2", 8, offload)
    errors = jax.tree.map(relative_error, found, expected)
    assert max(jax.tree.leaves(errors)) < 2e-3
    differ = jax.tree.map(lambda a, b: np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-6), found, expected)
    assert np.mean(jax.tree.leaves(differ)) < 0.01


def test_its_state_is_one_moment():
    workload = replace(preset_workload("llama_7b", find_target("v5e-256"), 2**17), optimizer=LION)
    adamw = replace(workload, optimizer=OptimizerConfig())
    of_shard = workload.trained_params / 256
    assert state_bytes(workload) == pytest.approx(8 * of_shard) and state_bytes(adamw) == pytest.approx(12 * of_shard)
    narrow = replace(workload, optimizer=replace(LION, offload="moments", moment_dtype="bfloat16"))
    assert offloaded_state(narrow) == pytest.approx(2 * of_shard)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "sgd"}, "unknown optimizer.name 'sgd'; choose adamw, lion or adafactor"),
        ({"name": "lion", "moment_dtype": "bfloat16,float32"}, "must be float32 or bfloat16 for lion"),
    ],
)
def test_other_names_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**changed)
