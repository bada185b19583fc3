"""Where parameters lie on a mesh."""

import math

import jax
import pytest
from jax.sharding import AbstractMesh

from ringformer.models.families.llama import PRESETS, LlamaConfig
from ringformer.parallel.mesh import AXIS_NAMES
from ringformer.parallel.parameters import weight_shardings
from ringformer.parallel.weight_sharding import shard_weight

MESHES = [(1, 1, 1, 256), (1, 1, 1, 512), (1, 4, 1, 64), (2, 8, 2, 3), (1, 7, 4, 5), (1, 1, 8, 32)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_lies_on_every_mesh(name, shape):
    """Nothing fails on a shape: what does not divide is padded, by less than 10%, and shared out evenly."""
    mesh = AbstractMesh(shape, AXIS_NAMES)
    config = LlamaConfig(**PRESETS[name])
    weights = jax.tree.leaves(weight_shardings(config, mesh))
    logical = sum(math.prod(w.shape) for w in weights)
    padded = sum(math.prod(w.padded_shape) for w in weights)
    assert logical == config.num_params
    if logical > 1e9:
        assert padded <= 1.1 * logical
    for w in weights:
        for size, axes in zip(w.padded_shape, w.spec, strict=True):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            assert size % math.prod(mesh.shape[a] for a in axes) == 0
        if len(w.shape) > 2:  # all but the vectors lie on every axis but dp
            on = {a for axes in w.spec for a in ((axes,) if isinstance(axes, str) else axes or ())}
            assert on == {a for a in ("fsdp", "tp", "sp") if mesh.shape[a] > 1}


def test_paper_presets_need_no_padding_but_3b():
    for name, shape in (("llama_7b", (1, 1, 1, 512)), ("llama_13b", (1, 1, 1, 512)), ("llama_65b", (1, 1, 1, 256))):
        weights = jax.tree.leaves(weight_shardings(LlamaConfig(**PRESETS[name]), AbstractMesh(shape, AXIS_NAMES)))
        assert all(w.shape == w.padded_shape for w in weights)


def test_heads_and_features_go_to_tp():
    mesh = AbstractMesh((1, 2, 4, 2), AXIS_NAMES)
    assert tuple(shard_weight("DHd", (3, 64, 8, 16), mesh).spec) == (None, ("fsdp", "sp"), "tp", None)
    assert shard_weight("FD", (3, 192, 64), mesh).spec[1] == "tp"
    # 2 key heads on 4 tp ranks: not sharded by head; tp joins the axes of ZeRO
    assert shard_weight("DKd", (3, 64, 2, 16), mesh).spec[1] == ("fsdp", "sp", "tp")
