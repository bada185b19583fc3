"""The gradient of every family over the ring, against transformers' own in float64."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file

from ringformer.checkpoints.saved_model import restore_params
from ringformer.convert import from_hf
from ringformer.convert.hf_config import from_hf_config
from ringformer.data import Batch
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import specs, weight_shardings
from ringformer.train.step import make_gradients
from tests.convert.families import FAMILIES as TINY
from tests.convert.families import save_tiny
from tests.helpers import relative_error, unpadded

T = 96
"""Tokens of a row: almost five windows, six original contexts."""
LARGEST = {"olmo3": 2e-6, "gemma3": 4e-6}
"""Error of the worst parameter's gradient in float32, on one device as on a ring, of models with norms after layers."""


def in_float64(monkeypatch) -> None:
    """Let transformers' norms and rotations stay in float64, which they would leave for float32."""
    to = torch.Tensor.to

    def stay(self, *args, **options):
        lower = torch.float32 in (*args, options.get("dtype"))
        return self if self.dtype == torch.float64 and lower else to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", stay)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: stay(self, torch.float32))


def expected_gradient(model, folder, tokens, targets):
    """The loss, and the gradient as a checkpoint of Hugging Face in `folder`, which is converted as weights are."""
    model = model.double()
    logits = model(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    names = load_file(folder.parent / "theirs" / "model.safetensors").keys()
    gradient = {name: p.grad.type(torch.float32).contiguous() for name, p in model.named_parameters() if name in names}
    assert gradient.keys() == names
    folder.mkdir()
    save_file(gradient, folder / "model.safetensors")
    (folder / "config.json").write_text((folder.parent / "theirs" / "config.json").read_text())
    return float(loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("family", [x if x == "qwen3" else pytest.param(x, marks=pytest.mark.slow) for x in TINY])
def test_the_gradient_is_that_of_transformers(family, tmp_path, monkeypatch):
    model = save_tiny(family, tmp_path / "theirs", initializer_range=0.1)
    tokens, targets = np.random.default_rng(0).integers(0, 257, (2, 2, T))
    with monkeypatch.context() as patch:
        in_float64(patch)
        expected_loss = expected_gradient(model, tmp_path / "gradient", tokens, targets)
    for name in ("theirs", "gradient"):
        from_hf(tmp_path / name, tmp_path / f"{name}-converted")

    config = from_hf_config(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    config = replace(config, compute_dtype="float32", q_chunk=8, k_chunk=8, ffn_chunk=16, loss_chunk=16)
    found = {}
    for mesh_dim, devices in (("1,1,1,1", 1), ("1,1,1,8", 8)):
        mesh = make_mesh(mesh_dim, jax.devices()[:devices])
        weights = weight_shardings(config, mesh)
        order = permutation(config.layout, T, devices)
        positions, mask = np.broadcast_to(np.arange(T), (2, T)), np.ones((2, T), bool)
        fields = *(x.astype(np.int32)[:, order] for x in (tokens, targets, positions)), None, mask, ~mask
        batch = jax.device_put(Batch(*fields), NamedSharding(mesh, BATCH))
        gradients = make_gradients(config, weights, mesh, accumulate=1)
        results = P(), specs(weights), P(), P(), P()
        run = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(specs(weights), BATCH), out_specs=results))
        loss, sums, _, trained, _ = run(restore_params(tmp_path / "theirs-converted", weights, mesh), batch)
        gradient = jax.tree.map(partial(jnp.multiply, 1 / trained), sums)
        expected = unpadded(restore_params(tmp_path / "gradient-converted", weights, mesh), weights)
        errors = jax.tree.map(relative_error, unpadded(gradient, weights), expected)
        found[devices] = relative_error(loss, expected_loss), max(jax.tree.leaves(errors))
    (loss, alone), (loss_of_ring, on_ring) = found[1], found[8]
    assert max(loss, loss_of_ring) <= 1e-6
    assert max(alone, on_ring) <= LARGEST.get(family, 1.2e-6), found
