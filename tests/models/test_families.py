"""Every family trains over the ring as on one device, whatever its layers are."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.convert.hf_config import from_hf_config
from ringformer.models.flops import visible_keys
from ringformer.models.layer_kinds import LayerKind, Period, periods_of
from ringformer.models.registry import FAMILIES, preset_config
from ringformer.parallel.parameters import abstract_model
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import init_state
from tests.convert.families import FAMILIES as TINY
from tests.convert.families import hf_config
from tests.helpers import relative_error
from tests.models.in_float64 import trained_in_float64
from tests.oracle import llama
from tests.train.test_step import CONFIG, packed_batch, setup, trained

MESHES = [
    ("1,1,1,8", {}),
    pytest.param("1,1,1,8", {"ulysses": 2, "remat": "attention"}, marks=pytest.mark.slow),
    pytest.param("1,1,2,4", {"ulysses": 2}, marks=pytest.mark.slow),
    pytest.param("1,2,4,1", {"remat": "dots"}, marks=pytest.mark.slow),
    pytest.param("1,1,2,4", {"layout": "contiguous", "offload": True}, marks=pytest.mark.slow),
    pytest.param("2,1,1,4", {"remat_group": 2, "remat": "attention", "offload": True}, marks=pytest.mark.slow),
    pytest.param("1,2,1,4", {"ring": "both_ways"}, marks=pytest.mark.slow),
]


def tiny(family: str, **changes):
    config = from_hf_config({"architectures": [FAMILIES[family].hugging_face.architecture]} | described(family))
    small = {"compute_dtype": "float32", "q_chunk": 8, "k_chunk": 8, "ffn_chunk": 16, "loss_chunk": 16}
    return dataclasses.replace(config, **small | changes)


def described(family: str) -> dict:
    """A tiny model's config.json; its window is shorter than a document, and longer than a rank's tokens."""
    keys = hf_config(family).to_dict()
    return {key: value for key, value in keys.items() if key != "architectures"} | {"initializer_range": 0.2}


@pytest.fixture(scope="module")
def alone():
    return cache(lambda family: trained_in_float64(tiny(family), steps=2))


QUICK = ("smollm3",)
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in TINY if family not in (*QUICK, "llama")]


@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
@pytest.mark.parametrize(("mesh_dim", "change"), MESHES)
def test_a_ring_trains_as_one_device(alone, family, mesh_dim, change):
    """Packed documents, two steps: losses, the gradient of every parameter, the parameters; one device in float64."""
    metrics, gradient, params = trained(mesh_dim, tiny(family, **change), steps=2)
    expected_metrics, expected_gradient, expected_params = alone(family)
    for m, e in zip(metrics, expected_metrics, strict=True):
        assert relative_error(m["loss"], e["loss"]) <= 1e-6
    for path, error in jax.tree.leaves_with_path(jax.tree.map(relative_error, gradient, expected_gradient)):
        assert error <= 5e-6, jax.tree_util.keystr(path)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, params, expected_params))) <= 1e-5
    assert all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_one_device_computes_in_float64():
    """Against an oracle that shares no line with the package. Angles are whole 2^-32 turns, as on every mesh; a number
    of float32 anywhere would leave 2e-8 or more (pi did, 2e-7)."""
    metrics, moment, _ = trained_in_float64(CONFIG, steps=1)
    mesh, optimizer, shardings, _, _ = setup("1,1,1,1", CONFIG, devices=1)
    params = jax.device_get(init_state(CONFIG, optimizer, shardings, mesh, seed=0).params)
    batch = packed_batch()
    architecture = llama.Architecture(CONFIG.rope_theta, CONFIG.norm_eps)
    total, sums = llama.loss_and_gradients(params, batch, architecture)
    assert relative_error(metrics[0]["loss"], total / batch.mask.sum()) <= 2e-9
    part = norm(moment) / norm(sums)  # the gradient was clipped
    expected = jax.tree.map(lambda x: part * x, sums)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, moment, expected))) <= 4e-9


def norm(tree) -> float:
    """Return the norm of all arrays of a tree, in float64."""
    return np.linalg.norm([np.linalg.norm(x) for x in jax.tree.leaves(tree)])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_groups_of_heads_have_their_own_biases_and_norms(alone, family):
    metrics, gradient, _ = trained("1,1,1,8", tiny(family, head_groups=2, remat="attention"), steps=2)
    expected_metrics, expected_gradient, _ = alone(family)
    assert relative_error(metrics[0]["loss"], expected_metrics[0]["loss"]) <= 1e-6
    assert max(jax.tree.leaves(jax.tree.map(relative_error, gradient, expected_gradient))) <= 5e-6


@pytest.mark.parametrize("preset", [name for family in FAMILIES.values() for name in family.presets])
def test_parameters_are_counted(preset):
    config = preset_config(preset)
    shapes = jax.tree.leaves(abstract_model(config)[1])
    assert sum(int(np.prod(x.shape)) for x in shapes) == config.num_params


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_float32_under_x64(family):
    with jax.enable_x64(True):
        shapes = jax.tree.leaves(abstract_model(tiny(family))[1])
    assert {str(x.dtype) for x in shapes} == {"float32"}


RELEASED = {
    "qwen2.5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "seed_oss_36b": 36_151_104_512,
    "smollm3_3b": 3_075_098_624,
    "olmo3_7b": 7_298_011_136,
    "gemma3_1b": 999_885_952,
    "mistral_7b": 7_248_023_552,
}
"""Parameters that the model cards or files of the released models state."""


@pytest.mark.parametrize("preset", RELEASED)
def test_presets_have_as_many_parameters_as_the_released_models(preset):
    assert preset_config(preset).num_params == RELEASED[preset]


W, F = LayerKind(8), LayerKind()


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("FFFF", [(1, "F4")]),
        ("FFFW", [(1, "F3 W1")]),
        ("WWWFWWWF", [(2, "W3 F1")]),
        ("WWWWWFWWWWWFWW", [(2, "W5 F1"), (1, "W2")]),
        ("WFWFWFW", [(3, "W1 F1"), (1, "W1")]),
        ("F", [(1, "F1")]),
        ("FFWWFFWWFW", [(2, "F2 W2"), (1, "F1 W1")]),
    ],
)
def test_layers_are_compiled_once_a_run(letters, expected):
    kinds = [{"W": W, "F": F}[x] for x in letters]
    found = periods_of(tuple(kinds))
    name = {W: "W", F: "F"}
    assert [(p.repeats, " ".join(f"{name[kind]}{n}" for kind, n in p.runs)) for p in found] == expected
    assert [kind for p in found for _ in range(p.repeats) for kind, n in p.runs for _ in range(n)] == kinds
    assert isinstance(found[0], Period)


def test_a_window_layer_counts_the_keys_it_sees():
    """Gemma 3 12B at 1M: eight layers of full attention, forty of 1024 keys."""
    config, T = preset_config("gemma3_12b"), 2**20
    assert visible_keys(config, T) == pytest.approx((8 * T / 2 + 40 * 1024) / 48, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": "FX"}, "layer_types='FX' has X; known: F"),
        ({"layer_types": ""}, "has no letter"),
        ({"layer_types": "W"}, "window=0 with layer_types='W': layers W need a window"),
        ({"window": 8}, "window=8 with layer_types='F': no layer W has it; set window=0"),
    ],
)
def test_patterns_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        preset_config("qwen3_0.6b", **changes)


def test_a_norm_over_all_heads_has_no_head_groups():
    with pytest.raises(ValueError, match="head_groups=2 with Olmo3Config"):
        preset_config("olmo3_7b", head_groups=2)


def test_growing_queries_need_an_original_context():
    with pytest.raises(ValueError, match=r"query_growth=0\.1 counts the original contexts"):
        preset_config("ministral3_8b", rope_scaling={"kind": "none"})


@pytest.mark.parametrize("family", ["qwen2", "olmo3"])
def test_biases_and_scales_do_not_decay(family):
    """With gradients of zero, AdamW changes matrices alone."""
    _, shapes, letters = abstract_model(tiny(family))
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0, weight_decay=0.5), 10, letters)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones)
    decayed = {jax.tree_util.keystr(path): bool((x != 0).any()) for path, x in jax.tree.leaves_with_path(updates)}
    vectors = [name for name in decayed if "norm" in name or "'b" in name]
    assert vectors and not any(decayed[name] for name in vectors)
    assert all(on for name, on in decayed.items() if name not in vectors)
