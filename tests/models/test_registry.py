"""The seam for models: a toy that knows nothing of LLaMA trains over the ring, and lends its parameters."""

import dataclasses
import json
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from ringformer.checkpoints.saved_model import model_of
from ringformer.convert import to_hf
from ringformer.data import Batch
from ringformer.inference.generator import Generator
from ringformer.models.decoder import Decoder
from ringformer.models.families.llama import LlamaConfig
from ringformer.models.registry import FAMILIES, Family, build, family_of, hugging_face_of, register
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig, base_config
from ringformer.runs.config_file import parse
from ringformer.train.loop import train
from ringformer.train.optimizer import make_optimizer
from ringformer.train.prepare import prepare
from ringformer.train.state import init_state, state_shardings
from ringformer.train.step import make_train_step
from tests.helpers import relative_error
from tests.models.bits import FEATURES
from tests.models.toy import Toy, ToyConfig
from tests.train.runs import read_metrics


def one_step(mesh_dim: str, devices: int):
    """Loss and logical parameters after a step on the same batch, in the mesh's layout."""
    mesh, config = make_mesh(mesh_dim, jax.devices()[:devices]), ToyConfig()
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0), 10, abstract_model(config)[2])
    shardings = state_shardings(weight_shardings(config, mesh), optimizer)
    state = init_state(config, optimizer, shardings, mesh, seed=1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 257, (4, 65), np.int32)
    ids = np.sort(rng.integers(1, 4, (4, 64)), axis=1).astype(np.int32)
    places = np.broadcast_to(np.arange(64, dtype=np.int32), (4, 64))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], places, ids, ids < 3, ids > 3)
    order = permutation(config.layout, 64, mesh.shape["sp"])
    batch = jax.device_put(jax.tree.map(lambda x: x[:, order], batch), NamedSharding(mesh, BATCH))
    state, metrics = make_train_step(config, optimizer, shardings, mesh, clip_norm=1.0)(state, batch)
    cut = jax.tree.map(lambda w, x: np.asarray(x)[tuple(map(slice, w.shape))], shardings.params, state.params)
    return float(metrics["loss"]), cut


def test_a_step_is_that_of_one_device():
    loss, params = one_step("1,1,1,1", 1)
    found, shards = one_step("1,2,1,4", 8)
    assert found == pytest.approx(loss, rel=1e-6)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: relative_error(a, b) < 1e-5, shards, params)))


@pytest.mark.slow
def test_a_run_trains_and_lends_its_parameters(tmp_path):
    (tmp_path / "text.txt").write_text("the ring carries blocks of keys and values around " * 200)
    values = base_config("toy")
    values.update({"seq_len": 64, "batch_size": 4, "steps": 20, "mesh_dim": "1,2,1,4", "run_dir": str(tmp_path / "a")})
    values.data.update({"store": str(tmp_path / "store"), "source": f"text:{tmp_path}/text.txt", "held_out": 0.0})
    values.optimizer.learning_rate = 2e-2
    train(prepare(parse(values)))
    losses = [row["loss"] for row in read_metrics(tmp_path / "a")]
    assert losses[-1] < losses[0] - 1 and model_of(tmp_path / "a") == ToyConfig()
    values.update({"init_from": str(tmp_path / "a"), "run_dir": str(tmp_path / "b"), "seq_len": 128, "steps": 1})
    train(prepare(parse(values)))
    assert read_metrics(tmp_path / "b")[0]["loss"] < losses[0] - 1
    values.model.width = 48
    with pytest.raises(ValueError, match="holds another model"):
        prepare(parse(values))


def test_what_a_family_cannot_do_is_its_own_word(tmp_path):
    values = base_config("wide_toy")
    assert values.model.width == 48
    values.update({"mesh_dim": "1,1,2,4", "run_dir": str(tmp_path)})
    values.data.store = str(tmp_path / "store")
    with pytest.raises(ValueError, match="ToyConfig does not support tensor parallelism: the mesh has tp=2"):
        prepare(parse(values))
    values.update({"mesh_dim": "1,1,1,8"})
    values.data.update({"packing": "whole", "buckets": 1})
    with pytest.raises(ValueError, match=r"data\.buckets=1 cuts the ring of sp=8 into smaller ones, which ToyConfig"):
        prepare(parse(values))


def test_names_are_taken_once():
    for name, presets in (("toy", {}), ("another", {"tiny": {}}), ("another", {"wide_toy": {}})):
        with pytest.raises(ValueError, match="registered already"):
            register(name, Family(ToyConfig, Toy, presets))
    with pytest.raises(ValueError, match=r"unknown model 'giant'; known models: tiny, .*wide_toy"):
        family_of("giant")


def test_what_a_class_lacks_is_said_at_the_door():
    class Mute(nnx.Module):
        loss = None

    class Bare:
        vocab_size, layout, ulysses, compute_dtype = 257, "zigzag", 1, "float32"

    with pytest.raises(ValueError, match=r"Mute lacks token_losses: see ringformer/models/interface\.py"):
        register("mute", Family(ToyConfig, Mute, {}))
    with pytest.raises(
        ValueError, match="Bare lacks ARCHITECTURE, CONTEXT, INHERITED, num_params, check_mesh, check_stage"
    ):
        register("bare", Family(Bare, Toy, {}))


@pytest.mark.parametrize("letters", ({}, {"letters": ""}, {"letters": "VDX"}))
def test_a_parameter_without_its_letters_is_named(letters, monkeypatch):
    class Unlettered(Toy):
        def __init__(self, config, *, rngs):
            self.table = nnx.Param(rngs.params.normal((5, 3)), **letters)

    monkeypatch.setitem(FAMILIES, "toy", Family(ToyConfig, Unlettered, {"toy": {}}))
    with pytest.raises(ValueError, match=r"a parameter of shape \(5, 3\) has letters="):
        abstract_model(ToyConfig())


class Other(Decoder):
    """A decoder that computes something else, which no one but its class knows."""

    def _head(self, dtype, gather):
        return -super()._head(dtype, gather)


@dataclass(frozen=True)
class OtherConfig(LlamaConfig):
    pass


@dataclass(frozen=True)
class ScaledConfig(LlamaConfig):
    @property
    def logit_scale(self):
        return 1.0


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Family(OtherConfig, Other, {}), "holds a OtherConfig with the class Other: inference and exports take"),
        (Family(OtherConfig, Decoder, {}, features=FEATURES), "holds a OtherConfig with batches with features"),
    ],
)
def test_what_only_a_class_computes_is_not_written_or_exported(tmp_path, monkeypatch, family, message):
    monkeypatch.setitem(FAMILIES, "other", family)
    saved = {"preset": "", "family": "other", "model": dataclasses.asdict(OtherConfig(61, 16, 24, 1, 2, 1, 8))}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (tmp_path / "checkpoints" / "1" / "default").mkdir(parents=True)
    for use in (lambda: Generator.load(tmp_path, max_length=64), lambda: to_hf(tmp_path, tmp_path / "out")):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_translation_is_inherited_only_unchanged():
    assert hugging_face_of(OtherConfig) is FAMILIES["llama"].hugging_face is not None
    assert hugging_face_of(ScaledConfig) is None


def test_only_a_llama_is_exported(tmp_path):
    (tmp_path / "config.json").write_text('{"preset": "toy", "model": {"vocab_size": 257, "width": 32}}')
    (tmp_path / "checkpoints" / "1" / "default").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a ToyConfig with the class Toy: inference and exports"):
        to_hf(tmp_path, tmp_path / "out")


def test_a_configuration_of_no_family_is_refused():
    class Stranger(ToyConfig):
        pass

    with pytest.raises(ValueError, match="no registered family has the configuration Stranger"):
        build(replace(Stranger()), nnx.Rngs(0))
    assert family_of("llama_7b").config is LlamaConfig
