"""Runs on buckets: each batch on rings as small as its documents allow, with the numbers of one device."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ringformer.data import Loader
from ringformer.data.packing.options import PackingOptions
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.loop import train
from ringformer.train.optimizer import make_optimizer
from ringformer.train.prepare import prepare
from ringformer.train.state import init_state, state_shardings
from ringformer.train.step import make_train_step
from tests.data.packing_samples import build
from tests.helpers import relative_error, unpadded
from tests.train import golden
from tests.train.runs import saved_arrays
from tests.train.test_packing import model

T = 64
LENGTHS = [60, 30, 31, 15, 16, 8, 8, 4, 3, 2] * 24
PACKING = PackingOptions(packing="whole", buckets=3)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS)


def first_moments(store, mesh_dim, devices, steps, **change):
    """Loss and gradient of each step alone, from fresh parameters; and the rings of the step."""
    config = dataclasses.replace(model("zigzag"), **change)
    mesh = make_mesh(mesh_dim, jax.devices()[:devices], config.ulysses)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0, schedule="constant"), 10, abstract_model(config)[2])
    shardings = state_shardings(weight_shardings(config, mesh), optimizer)
    of_data = dict(batch_size=2, seq_len=T, seed=1, layout="zigzag", packing=PACKING)
    loader = Loader(store, ring_size=mesh.shape["sp"] // config.ulysses, **of_data)
    found = []
    step_on = {}
    for step in steps:
        rings = loader.rings(step)
        if rings not in step_on:
            step_on[rings] = make_train_step(config, optimizer, shardings, mesh, clip_norm=1e9, rings=rings)
        state = init_state(config, optimizer, shardings, mesh, seed=0)
        state, metrics = step_on[rings](state, loader.batch(step, NamedSharding(mesh, BATCH)))
        found.append((rings, float(metrics["loss"]), unpadded(state.opt_state[0].mu, shardings.params)))
    return found


@pytest.mark.parametrize(
    ("mesh_dim", "change", "expected_rings"),
    [
        ("1,1,1,8", {}, {2: 4}),
        pytest.param("1,1,1,8", {}, {0: 1, 1: 2, 2: 4, 3: 8}, marks=pytest.mark.slow),
        pytest.param("1,1,2,4", {"ring": "gathered"}, {0: 1, 1: 2, 2: 4, 3: 4}, marks=pytest.mark.slow),
        pytest.param("1,1,1,8", {"ulysses": 2, "window": 9}, {0: 1, 1: 2, 2: 4, 3: 4}, marks=pytest.mark.slow),
        pytest.param("1,2,1,4", {"ring": "both_ways"}, {0: 1, 1: 2, 2: 4, 3: 4}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_of_a_batch_are_those_of_one_device(store, mesh_dim, change, expected_rings):
    """A batch of each of these buckets, numbered by the halvings of a sequence, on rings as small as its documents
    allow."""
    whole = Loader(store, ring_size=8, batch_size=2, seq_len=T, seed=1, layout="zigzag", packing=PACKING)
    steps = [next(s for s in range(99) if whole.sequences.halvings(s) == k) for k in expected_rings]
    alone = {name: change[name] for name in change if name == "window"}
    expected = first_moments(store, "1,1,1,1", 1, steps, **alone)
    found = first_moments(store, mesh_dim, 8, steps, **change)
    assert [rings for rings, *_ in found] == list(expected_rings.values())
    for (_, loss, gradient), (_, e_loss, e_gradient) in zip(found, expected, strict=True):
        assert relative_error(loss, e_loss) <= 1e-6
        assert max(jax.tree.leaves(jax.tree.map(relative_error, gradient, e_gradient))) <= 1e-5


@pytest.mark.slow
def test_a_run_resumes_on_the_same_bits(tmp_path):
    """Stopped after step 4 and resumed; steps of several buckets on both sides."""
    config = golden.golden_config(tmp_path)
    data = dataclasses.replace(config.data, packing="whole", buckets=2)
    config = dataclasses.replace(
        config, data=data, steps=8, seq_len=512, batch_size=2, mesh_dim="1,1,1,8", accumulate=1, checkpoint_every=4
    )
    optimizer = dataclasses.replace(config.optimizer, schedule="constant")
    config = dataclasses.replace(config, optimizer=optimizer)
    run = prepare(config)
    before, after = ({run.train_data.rings(step) for step in steps} for steps in (range(4), range(4, 8)))
    assert len(before & after) > 1
    train(run)
    twice = dataclasses.replace(config, run_dir=str(tmp_path / "twice"))
    train(prepare(dataclasses.replace(twice, steps=4)))
    train(prepare(twice))
    once, again = golden.numbers(config.run_dir), golden.numbers(twice.run_dir)
    np.testing.assert_array_equal(once["loss"], again["loss"])
    assert saved_arrays(Path(config.run_dir), 8) == saved_arrays(Path(twice.run_dir), 8)
