"""A step on simulated devices has an order for all its loops of permutes, and returns the same loss every time."""

import dataclasses

import jax
import numpy as np
import pytest

from ringformer.models import layer_scan
from ringformer.models.families.smollm3 import SmolLM3Config
from ringformer.train.state import init_state
from ringformer.train.step import make_train_step
from tests.helpers import relative_error
from tests.train.test_step import CONFIG, SGD_LIKE, setup, trained
from tests.unordered_loops import unordered_loops

DEVICES = 6
SHARED = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
SMOLLM3 = SmolLM3Config(**SHARED | {"num_layers": 4, "layer_types": "FFFN", "tie_embeddings": True})
"""The last layer of a period is of its own kind. XLA writes loops of one turn out, so its recomputation stands beside
the loops of other layers."""


LAYOUTS = ("contiguous", "striped", "zigzag")


def compiled_step(change):
    config = dataclasses.replace(SMOLLM3, **change)
    mesh, optimizer, shardings, _, batch = setup("1,1,2,3", config, DEVICES)
    state = init_state(config, optimizer, shardings, mesh, seed=0)
    step = make_train_step(config, optimizer, shardings, mesh, clip_norm=SGD_LIKE.clip_norm, accumulate=1)
    unpolished = {"xla_backend_optimization_level": 0}
    return step.lower(state, batch).compile(compiler_options=unpolished), state, batch


WINDOWS = {"layer_types": "WWF", "window": 20, "num_layers": 3, "layout": "contiguous"}
"""The segment ids of the last layer's ring stand beside the loop over the layers before it."""


@pytest.mark.usual("change0")
@pytest.mark.parametrize(
    "change",
    [
        {"remat_group": 2, "layout": "contiguous", "layer_types": "FFN", "num_layers": 3},
        WINDOWS,
        WINDOWS | {"offload": True},
        {"layer_types": "FNFN"},
        {"layer_types": "FNFN", "remat": "attention", "offload": True},
        {"remat_group": 2, "offload": True},
        {"remat_group": 2, "ulysses": 3, "num_heads": 6, "remat": "dots"},
        {"remat_group": 2, "ring": "gathered"},
        {"remat_group": 3, "remat": "none"},
    ],
)
def test_layers_recompute_in_order(change):
    compiled, _, _ = compiled_step(change)
    assert unordered_loops(compiled.as_text()) == []


@pytest.mark.slow
@pytest.mark.unordered
@pytest.mark.parametrize(
    "change", [{"remat_group": 2, "layout": "contiguous", "layer_types": "FFN", "num_layers": 3}, WINDOWS]
)
def test_without_the_tie_loops_are_found(monkeypatch, change):
    """The control: the same step, whose layers do not wait for their cotangents, has pairs that nothing orders."""
    monkeypatch.setattr(layer_scan, "after", lambda tree, done: tree)
    compiled, _, _ = compiled_step(change)
    pairs = unordered_loops(compiled.as_text())
    print(f"{len(pairs)} pairs")  # for whoever looks with -s
    assert pairs


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots", "attention"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_run_of_a_step_returns_the_loss_of_one_device(layout, remat):
    compiled, state, batch = compiled_step({"remat_group": 2, "layout": layout, "remat": remat})
    alone = dataclasses.replace(SMOLLM3, attention="vanilla", remat="none")
    expected, _, _ = trained("1,1,1,1", alone, devices=1, steps=1)
    for _ in range(5):
        copy = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
        _, metrics = compiled(copy, batch)
        assert relative_error(jax.device_get(metrics["loss"]), expected[0]["loss"]) < 1e-5
