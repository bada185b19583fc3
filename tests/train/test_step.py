"""The sharded train step against one device with dense attention: loss, every gradient leaf, three updates."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ringformer.data import Batch
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import init_state, state_shardings
from ringformer.train.step import make_logits, make_train_step
from tests.helpers import relative_error, unpadded
from tests.interpreted import interpreted

B, T = 4, 96
# 36 and 61 do not divide by 8: some weights are padded.
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=36,
    intermediate_size=104,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    init_std=0.2,
    compute_dtype="float32",
    ffn_chunk=10,
    loss_chunk=7,
    q_chunk=8,
    k_chunk=5,
)
SGD_LIKE = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, eps=1e-3, clip_norm=0.5, schedule="constant")
"""A large eps keeps AdamW's update smooth in the gradient, so that a wrong gradient shows and rounding does not."""


def packed_batch() -> Batch:
    """Documents of all lengths across shard edges; a loss mask from nearly none to nearly all along the sequence."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(1, 6, (B, T)), axis=1)
    positions = np.stack([np.concatenate([np.arange((row == i).sum()) for i in np.unique(row)]) for row in ids])
    mask = rng.random((B, T)) < np.linspace(0.02, 0.95, T)
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, B, T))
    return Batch(*(x.astype(np.int32) for x in (tokens, targets, positions, ids)), mask, ends=np.zeros_like(mask))


def setup(mesh_dim, config, devices):
    mesh = make_mesh(mesh_dim, jax.devices()[:devices])
    optimizer = make_optimizer(SGD_LIKE, 10, abstract_model(config)[2])
    shardings = state_shardings(weight_shardings(config, mesh), optimizer)
    order = permutation(config.layout, T, mesh.shape["sp"] // config.ulysses)
    batch = jax.tree.map(lambda x: jax.device_put(x[:, order], NamedSharding(mesh, BATCH)), packed_batch())
    return mesh, optimizer, shardings, order, batch


def trained(mesh_dim, config, accumulate=1, devices=8, steps=3):
    """The metrics of the steps; the first gradient, as AdamW's first moment after one step; the parameters."""
    mesh, optimizer, shardings, _, batch = setup(mesh_dim, config, devices)
    state = init_state(config, optimizer, shardings, mesh, seed=0)
    step = make_train_step(config, optimizer, shardings, mesh, clip_norm=SGD_LIKE.clip_norm, accumulate=accumulate)
    metrics = []
    for i in range(steps):
        state, m = step(state, batch)
        metrics.append(jax.device_get(m))
        if i == 0:
            moment = state.opt_state[0].mu
            gradient = unpadded(moment, shardings.params)
    return metrics, gradient, unpadded(state.params, shardings.params)


@pytest.fixture(scope="module")
def one_device():
    return trained("1,1,1,1", dataclasses.replace(CONFIG, attention="vanilla", remat="none"), devices=1)


SOME_KEPT = {"remat": "attention", "full_remat_layers": 1, "offload": True}
MIXTURES = [
    ("1,1,1,8", {}, 1),
    pytest.param("2,2,2,1", {"remat_group": 2}, 1, marks=pytest.mark.slow),
    ("1,2,2,2", {"layout": "striped", "remat": "feedforward"}, 2),
    pytest.param("2,1,1,4", {"layout": "contiguous", "remat": "dots"}, 2, marks=pytest.mark.slow),
    pytest.param("1,1,2,4", {"remat": "attention"}, 4, marks=pytest.mark.slow),
    pytest.param("1,2,4,1", {}, 1, marks=pytest.mark.slow),
    pytest.param("1,4,1,2", {"remat": "none"}, 1, marks=pytest.mark.slow),
    pytest.param("4,1,2,1", {"layout": "contiguous"}, 1, marks=pytest.mark.slow),
    ("1,2,1,4", {"remat_group": 2, "head_groups": 2, "offload": True}, 1),
    pytest.param("1,1,1,8", {"ulysses": 4, "remat": "attention"}, 1, marks=pytest.mark.slow),
    ("1,1,2,4", {"ulysses": 2, "layout": "striped"}, 2),
    ("1,1,1,8", {"ulysses": 2, "ring": "both_ways", "remat": "attention"}, 1),
    ("1,2,1,4", {"ring": "gathered"}, 1),
    pytest.param("1,1,1,8", {"ulysses": 2, "head_groups": 2, "remat": "dots"}, 1, marks=pytest.mark.slow),
    pytest.param("2,1,1,4", {"ulysses": 4, "layout": "contiguous", "remat_group": 2}, 1, marks=pytest.mark.slow),
    pytest.param("1,2,1,4", {"head_groups": 2} | SOME_KEPT, 1, marks=pytest.mark.slow),
    pytest.param("1,1,2,4", {"ulysses": 2} | SOME_KEPT, 2, marks=pytest.mark.slow),
]


@pytest.mark.usual("1,1,2,4-{'ulysses': 2, 'layout': 'striped'}-2")
@pytest.mark.parametrize(("mesh_dim", "change", "accumulate"), MIXTURES, ids=str)
def test_any_mesh_trains_as_one_device(one_device, mesh_dim, change, accumulate):
    """Uneven masks, packed documents, padded weights, fewer key heads than tp ranks, gradient accumulation."""
    config = dataclasses.replace(CONFIG, **change)
    metrics, gradient, params = trained(mesh_dim, config, accumulate)
    expected_metrics, expected_gradient, expected_params = one_device
    for m, e in zip(metrics, expected_metrics, strict=True):
        assert m["tokens"] == e["tokens"]
        assert relative_error(m["loss"], e["loss"]) < 1e-5
        assert relative_error(m["grad_norm"], e["grad_norm"]) < 1e-5
    assert metrics[0]["grad_norm"] > SGD_LIKE.clip_norm  # or clipping is not tested
    worst = {}
    for name, actual, expected in (("gradient", gradient, expected_gradient), ("params", params, expected_params)):
        errors = jax.tree.leaves_with_path(jax.tree.map(relative_error, actual, expected))
        worst[name] = max((e, jax.tree_util.keystr(path)) for path, e in errors)
    assert max(e for e, _ in worst.values()) < 1e-5, worst


@pytest.mark.slow
def test_as_many_query_heads_of_a_rank_as_key_heads_of_all():
    """Eight query heads and two key heads on tp=4: a rank has two of the former, and reads one of the latter."""
    config = dataclasses.replace(CONFIG, num_heads=8)
    metrics, gradient, _ = trained("1,1,4,2", config, steps=1)
    alone = dataclasses.replace(config, attention="vanilla", remat="none")
    expected_metrics, expected_gradient, _ = trained("1,1,1,1", alone, devices=1, steps=1)
    assert relative_error(metrics[0]["loss"], expected_metrics[0]["loss"]) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(relative_error, gradient, expected_gradient))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_dim", "change"),
    [("1,1,1,8", {}), ("1,1,2,4", {"ulysses": 2, "remat": "attention"})],
)
def test_a_window_trains_as_one_device(mesh_dim, change):
    """Over several parts of the ring, packed documents included."""
    config = dataclasses.replace(CONFIG, window=11)
    alone = dataclasses.replace(config, attention="vanilla", remat="none")
    (expected,), expected_gradient, _ = trained("1,1,1,1", alone, devices=1, steps=1)
    (metrics,), gradient, _ = trained(mesh_dim, dataclasses.replace(config, **change), steps=1)
    assert relative_error(metrics["loss"], expected["loss"]) < 1e-6
    assert max(jax.tree.leaves(jax.tree.map(relative_error, gradient, expected_gradient))) < 1e-5


@pytest.mark.slow
def test_the_tpu_kernels_train_as_one_device(one_device):
    """Two rings of two; packed documents in shards that are no whole chunks, and heads in groups."""
    config = dataclasses.replace(CONFIG, kernel="pallas", head_groups=2)
    with interpreted():
        (metrics,), gradient, _ = trained("1,2,1,2", config, devices=4, steps=1)
    (expected, *_), expected_gradient, _ = one_device
    assert metrics["tokens"] == expected["tokens"]
    assert relative_error(metrics["loss"], expected["loss"]) < 1e-5
    assert relative_error(metrics["grad_norm"], expected["grad_norm"]) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(relative_error, gradient, expected_gradient))) < 1e-5


@pytest.mark.slow
def test_odd_ring_of_six(one_device):
    metrics, _, params = trained("1,2,1,3", CONFIG, devices=6)
    assert relative_error(metrics[-1]["loss"], one_device[0][-1]["loss"]) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(relative_error, params, one_device[2]))) < 1e-5


def test_logits_on_the_ring_and_no_leak_between_documents():
    """Ring logits equal dense ones, and a changed document leaves every other bitwise as it was."""
    config = dataclasses.replace(CONFIG, layout="zigzag")
    mesh, optimizer, shardings, order, batch = setup("1,1,1,8", config, 8)
    params = init_state(config, optimizer, shardings, mesh, seed=0).params
    logits = make_logits(config, shardings.params, mesh)
    ids = np.asarray(batch.segment_ids)
    changed = np.where(ids == 2, (np.asarray(batch.tokens) + 1) % CONFIG.vocab_size, batch.tokens).astype(np.int32)
    before = np.asarray(logits(params, batch))
    after = np.asarray(logits(params, batch._replace(tokens=jax.device_put(changed, batch.tokens.sharding))))
    np.testing.assert_array_equal(before[ids != 2], after[ids != 2])
    assert (before[ids == 2] != after[ids == 2]).any()

    one = dataclasses.replace(CONFIG, attention="vanilla")
    mesh1, optimizer1, shardings1, _, batch1 = setup("1,1,1,1", one, 1)
    params1 = init_state(one, optimizer1, shardings1, mesh1, seed=0).params
    expected = np.asarray(make_logits(one, shardings1.params, mesh1)(params1, batch1))
    assert relative_error(before[:, np.argsort(order)], expected) < 1e-5
