"""Where parameters lie on a mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ringformer.models.families.llama import PRESETS, LlamaConfig
from ringformer.parallel.gather_weight import gather_weight, padded_size, stand_in
from ringformer.parallel.mesh import AXIS_NAMES, make_mesh
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


def test_paper_presets_need_no_padding_but_3b_and_65b():
    """65B's 22,016 features are 86 a device on 256: padded to 88."""
    for name in ("llama_7b", "llama_13b"):
        config = LlamaConfig(**PRESETS[name])
        weights = jax.tree.leaves(weight_shardings(config, AbstractMesh((1, 1, 1, 512), AXIS_NAMES)))
        assert all(w.shape == w.padded_shape for w in weights)
    weights = jax.tree.leaves(
        weight_shardings(LlamaConfig(**PRESETS["llama_65b"]), AbstractMesh(MESHES[0], AXIS_NAMES))
    )
    padded = {w.padded_shape for w in weights if w.shape != w.padded_shape}
    assert padded == {(80, 8192, 88 * 256), (80, 88 * 256, 8192)}


def test_heads_and_features_go_to_tp():
    mesh = AbstractMesh((1, 2, 4, 2), AXIS_NAMES)
    assert tuple(shard_weight("DHd", (3, 64, 8, 16), mesh).spec) == (None, ("fsdp", "sp"), "tp", None)
    assert shard_weight("FD", (3, 192, 64), mesh).spec[1] == "tp"
    # 2 key heads on 4 tp ranks: not sharded by head; tp joins the axes of ZeRO
    assert shard_weight("DKd", (3, 64, 2, 16), mesh).spec[1] == ("fsdp", "sp", "tp")


@pytest.mark.parametrize(
    ("size", "shards", "padded"),
    [
        (128256, 64, 64 * 2048),
        (151936, 64, 64 * 2376),  # 128 rows would need 2.4%
        (262208, 64, 64 * 4104),
        (11008, 64, 64 * 176),
        (14336, 64, 14336),
        (32000, 256, 32000),
        (257, 8, 264),
    ],
)
def test_large_dimensions_are_padded_to_whole_tiles(size, shards, padded):
    """128 rows a shard, or else eight, if that takes at most 2.35%."""
    assert padded_size(size, shards) == padded


def test_a_gradient_of_whole_tiles_is_that_of_the_weight():
    """8,100 rows on 8 devices are 1,024 a device: each device's gradient of the gathered weight, summed, and zero in
    the padding; also through the stand-in of a layer's weight."""
    mesh = make_mesh("1,2,1,4", jax.devices())
    axes = ("fsdp", "sp")
    size = 8100
    whole = padded_size(size, 8)
    assert whole == 8 * 1024
    w = np.pad(np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32), [(0, whole - size), (0, 0)])
    given = jnp.asarray(np.random.default_rng(1).normal(size=(8, size, 3)).astype(np.float32))

    def of_device(w, given):
        gathered, pull_back = jax.vjp(lambda w: gather_weight(w, axes, -2, size, jnp.float32), w)
        zeros, pull_back_stand_in = jax.vjp(lambda w: stand_in(w, axes, -2, size), w)
        assert zeros.shape == gathered.shape
        return gathered[None], *pull_back(given[0]), *pull_back_stand_in(given[0])

    run = jax.shard_map(
        of_device, mesh=mesh, in_specs=(P(axes), P(axes)), out_specs=(P(axes), P(axes), P(axes)), check_vma=False
    )
    gathered, dw, of_stand_in = jax.jit(run)(w, given)
    assert all(np.array_equal(each, w[:size]) for each in gathered)
    np.testing.assert_allclose(dw[:size], given.sum(axis=0), rtol=1e-5, atol=1e-5)
    assert not np.asarray(dw[size:]).any() and np.array_equal(dw, of_stand_in)
