"""Adapters train on any mesh as on one device; their gradients follow from those of the weights that they change."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.ops.layouts import permutation
from ringformer.parallel.lora import PROJECTIONS, Adapted, AdaptedSharding, Lora, LoraConfig
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import named
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import TrainState, make_first_state, make_init, state_shardings
from ringformer.train.step import make_train_step
from tests.helpers import relative_error, unpadded
from tests.train.test_step import CONFIG, SGD_LIKE, T, packed_batch

RANK, SCALE = 3, 1.5
LORA = LoraConfig(rank=RANK, alpha=SCALE * RANK)
ONE_DEVICE = dataclasses.replace(CONFIG, attention="vanilla", remat="none")


def factors(lora: Lora) -> dict:
    """Adapters whose factors are both random: with B = 0, A has no gradient."""
    rng = np.random.default_rng(5)
    shapes, _ = lora.config.shapes(lora.model)
    return jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(np.float32), shapes)


def on_mesh(shardings: dict, arrays: dict, mesh) -> dict:
    def padded(sharding, x):
        return np.pad(x, [(0, whole - n) for whole, n in zip(sharding.padded_shape, x.shape, strict=True)])

    return jax.device_put(jax.tree.map(padded, shardings, arrays), named(shardings, mesh))


def trained(mesh_dim, config, devices=8, accumulate=1, lora=LORA, steps=3):
    """Metrics, the first gradient as AdamW's first moment, the adapters after the steps, and the frozen weights."""
    mesh = make_mesh(mesh_dim, jax.devices()[:devices])
    adapters = Lora(lora, config, mesh)
    optimizer = make_optimizer(SGD_LIKE, 10, adapters.letters)
    shardings = state_shardings(adapters.adapters, optimizer)
    frozen = make_init(config, adapters.frozen, mesh, 0)()
    params = on_mesh(adapters.adapters, factors(adapters), mesh)
    step_number, opt_state = make_first_state(optimizer, shardings, mesh)(params)
    state = TrainState(step_number, params, opt_state)
    order = permutation(config.layout, T, mesh.shape["sp"] // config.ulysses)
    batch = jax.tree.map(lambda x: jax.device_put(x[:, order], NamedSharding(mesh, BATCH)), packed_batch())
    options = {"clip_norm": SGD_LIKE.clip_norm, "accumulate": accumulate, "lora": adapters}
    step = make_train_step(config, optimizer, shardings, mesh, **options)
    metrics = []
    for i in range(steps):
        state, m = step(state, batch, frozen)
        metrics.append(jax.device_get(m))
        if i == 0:
            gradient = unpadded(state.opt_state[0].mu, adapters.adapters)
    return metrics, gradient, unpadded(state.params, adapters.adapters), unpadded(frozen, adapters.frozen)


@cache
def alone():
    return trained("1,1,1,1", ONE_DEVICE, devices=1)


MIXTURES = [
    ("1,1,1,8", {}, 1),
    ("1,2,2,2", {"remat": "feedforward", "layout": "striped"}, 2),
    ("1,2,1,4", {"remat_group": 2, "head_groups": 2, "offload": True}, 1),
    ("1,2,1,4", {"remat": "attention", "full_remat_layers": 1, "head_groups": 2, "offload": True}, 1),
    pytest.param("1,1,2,4", {"ulysses": 2, "remat": "dots"}, 2, marks=pytest.mark.slow),
    pytest.param("1,2,4,1", {}, 1, marks=pytest.mark.slow),
    pytest.param("2,1,1,4", {"ring": "gathered"}, 1, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_dim", "change", "accumulate"), MIXTURES, ids=str)
def test_adapters_train_as_on_one_device(mesh_dim, change, accumulate):
    metrics, gradient, params, _ = trained(mesh_dim, dataclasses.replace(CONFIG, **change), accumulate=accumulate)
    expected_metrics, expected_gradient, expected_params, _ = alone()
    for m, e in zip(metrics, expected_metrics, strict=True):
        assert relative_error(m["loss"], e["loss"]) <= 1e-6 and m["tokens"] == e["tokens"]
        assert relative_error(m["grad_norm"], e["grad_norm"]) <= 2e-6
    for actual, expected in ((gradient, expected_gradient), (params, expected_params)):
        assert max(jax.tree.leaves(jax.tree.map(relative_error, actual, expected))) <= 5e-6
    assert len(jax.tree.leaves(gradient)) == 14 and all(np.any(np.asarray(x)) for x in jax.tree.leaves(gradient))


def test_gradients_follow_from_those_of_the_weights():
    """dA = s dW B^T and dB = s A^T dW, in float64, from the gradient of a model that has W + s A B as its weights."""
    metrics, gradient, _, frozen = trained("1,1,1,8", CONFIG, steps=1)
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    lora = Lora(LORA, ONE_DEVICE, mesh)
    adapters, weights = factors(lora), jax.tree.map(lambda x: np.array(x, np.float64), frozen)
    for part, weight, _ in PROJECTIONS.values():
        a, b = (adapters["layers"][part][weight][key].astype(np.float64) for key in "ab")
        weights["layers"][part][weight] += SCALE * np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b, strict=True)])
    optimizer = make_optimizer(SGD_LIKE, 10, jax.tree.map(lambda _: "DD", weights))
    shardings = state_shardings(lora.frozen, optimizer)
    params = on_mesh(lora.frozen, jax.tree.map(lambda x: x.astype(np.float32), weights), mesh)
    state = TrainState(*make_first_state(optimizer, shardings, mesh)(params)[:1], params, optimizer.init(params))
    step = make_train_step(ONE_DEVICE, optimizer, shardings, mesh, clip_norm=1e9)
    state, whole = step(state, jax.device_put(packed_batch(), NamedSharding(mesh, BATCH)))
    assert relative_error(metrics[0]["loss"], whole["loss"]) <= 1e-6
    clipped = min(1.0, SGD_LIKE.clip_norm / float(metrics[0]["grad_norm"]))
    for part, weight, inputs in PROJECTIONS.values():
        dw = np.asarray(state.opt_state[0].mu["layers"][part][weight], np.float64) * clipped
        a, b = (adapters["layers"][part][weight][key].astype(np.float64) for key in "ab")
        found = gradient["layers"][part][weight]
        outputs = b.ndim - 2
        for i in range(len(dw)):
            axes = list(range(inputs, inputs + outputs)), list(range(1, 1 + outputs))
            assert relative_error(found["a"][i], SCALE * np.tensordot(dw[i], b[i], axes)) <= 1e-5
            axes = list(range(inputs)), list(range(inputs))
            assert relative_error(found["b"][i], SCALE * np.tensordot(a[i], dw[i], axes)) <= 1e-5


def test_merged_weights_are_the_sum():
    mesh = make_mesh("1,2,2,2", jax.devices()[:8])
    lora = Lora(LORA, CONFIG, mesh)
    frozen, adapters = make_init(CONFIG, lora.frozen, mesh, 0)(), factors(lora)
    before = jax.tree.map(np.array, unpadded(frozen, lora.frozen))
    merged = unpadded(lora.merge(frozen, on_mesh(lora.adapters, adapters, mesh)), lora.frozen)
    for part, weight, _ in PROJECTIONS.values():
        a, b = (adapters["layers"][part][weight][key].astype(np.float64) for key in "ab")
        product = np.stack([np.tensordot(x, y, 1) for x, y in zip(a, b, strict=True)])
        w = before["layers"][part].pop(weight)
        assert relative_error(merged["layers"][part].pop(weight), w + SCALE * product) <= 1e-7
    jax.tree.map(np.testing.assert_array_equal, merged, before)


def test_fresh_adapters_change_nothing():
    lora = Lora(LoraConfig(rank=2, targets="q_proj,down_proj"), CONFIG, make_mesh("1,1,1,8", jax.devices()[:8]))
    adapters = unpadded(lora.make_init(0)(), lora.adapters)["layers"]
    assert {(part, weight) for part in adapters for weight in adapters[part]} == {
        ("attention", "wq"),
        ("feedforward", "w_down"),
    }
    for weight, inputs in ((adapters["attention"]["wq"], 36), (adapters["feedforward"]["w_down"], 104)):
        assert not np.any(weight["b"]) and np.abs(weight["a"]).max() <= inputs**-0.5
        assert np.std(weight["a"]) == pytest.approx((3 * inputs) ** -0.5, rel=0.2)


def test_fresh_adapters_are_the_same_under_x64():
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    expected = Lora(LORA, CONFIG, mesh).make_init(0)()
    with jax.enable_x64(True):
        found = Lora(LORA, CONFIG, mesh).make_init(0)()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, r"lora\.rank=-1 must be at least 0"),
        ({"rank": 0, "alpha": 8.0}, r"lora\.rank=0 trains all weights, but other keys of lora are set"),
        ({"alpha": 0.0}, r"lora\.alpha=0\.0 must be positive"),
        ({"targets": "q_proj,qkv"}, r"lora\.targets has qkv; the projections are q_proj, k_proj, .*down_proj"),
        ({"targets": " , "}, r"lora\.targets is empty"),
        ({"base_dtype": "int8"}, r"unknown lora\.base_dtype 'int8'; choose float32 or bfloat16"),
    ],
)
def test_bad_adapters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**{"rank": 4} | changes).check()


def test_a_rank_beyond_the_weights_is_refused():
    model = LlamaConfig(**preset("tiny"))
    most = min(model.hidden_size, model.num_kv_heads * model.head_dim)
    with pytest.raises(
        ValueError, match=rf"lora\.rank={most + 1} is more than the rank of k_proj, which is at most {most}"
    ):
        LoraConfig(most + 1, targets="k_proj").shapes(model)
    LoraConfig(most, targets="k_proj").shapes(model)


def test_a_model_that_knows_no_layer_weights_gets_arrays():
    """As a model of a user's own does, which may also lack some of the projections."""
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    lora = Lora(LoraConfig(rank=RANK, targets="q_proj"), CONFIG, mesh)
    plain = jax.tree.map(lambda sharding: dataclasses.replace(sharding, of_product=False), lora.frozen)
    del plain["layers"]["feedforward"]
    lora.__dict__["frozen"] = plain
    assert "feedforward" not in lora.weights["layers"]
    shardings = lora.weights["layers"]["attention"]
    assert [name for name, sharding in shardings.items() if isinstance(sharding, AdaptedSharding)] == ["wq"]
    w, a, b = (np.ones(shape, np.float32) for shape in ((36, 4, 8), (36, RANK), (RANK, 4, 8)))
    gathered = shardings["wq"].for_layer(Adapted(*map(jax.numpy.asarray, (w, a, b))), "float32")
    np.testing.assert_allclose(gathered, 1 + 2 * RANK)
