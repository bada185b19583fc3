"""bfloat16 weights: small updates add up, gradients stay float32, and everything that reads a run reads them."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.convert.export_hf import to_hf
from ringformer.convert.safetensors_files import TensorFolder
from ringformer.estimate.closed_forms.training import offloaded_state, peak_bytes, state_bytes
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload, estimate_command, preset_workload
from ringformer.inference.generator import load_model
from ringformer.models.registry import preset_config
from ringformer.parallel.lora import LoraConfig
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import by_name, specs
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train import update
from ringformer.train.loop import train
from ringformer.train.optimizer import make_optimizer
from ringformer.train.prepare import prepare
from ringformer.train.program import make_program
from ringformer.train.state import init_state
from ringformer.train.step import make_gradients
from ringformer.train.update import apply_update
from tests.helpers import relative_error, unpadded
from tests.hlo import on_tpu
from tests.train.runs import MODEL, read_metrics, read_parameters, saved_arrays
from tests.train.test_step import CONFIG, T
from tests.train.updates import batch_on, same_bits, trained

NARROW = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, params_dtype="bfloat16")


def updated(optimizer: optax.GradientTransformation, grad: np.ndarray, steps: int) -> np.ndarray:
    """Weights of 1 in bfloat16 after so many updates with the same gradient."""
    params = {"w": jnp.ones(grad.shape, jnp.bfloat16)}
    grads = {"w": jnp.asarray(grad)}

    def step(i, state):
        new = apply_update(optimizer, *state, grads, jnp.float32(1), jnp.bool_(True), i)
        return new.params, new.opt_state

    params, _ = jax.jit(lambda state: jax.lax.fori_loop(0, steps, step, state))((params, optimizer.init(params)))
    assert params["w"].dtype == jnp.bfloat16
    return np.asarray(params["w"], np.float64)


def test_updates_add_up_that_rounding_to_nearest_loses(monkeypatch):
    """500 updates of 1e-4 from 1, where two neighbours are 39 times as far apart: to five standard errors."""
    grad = np.random.default_rng(0).uniform(0.5e-4, 1.5e-4, 4096).astype(np.float32)
    found = updated(optax.sgd(1.0), grad, 500)
    expected = 1 - 500 * grad.astype(np.float64)
    spread = (found - expected).std()
    assert abs((found - expected).mean()) <= 5 * spread / np.sqrt(grad.size) and spread < 0.02
    monkeypatch.setattr(update, "round_stochastically", lambda x, key, beside: x.astype(jnp.bfloat16))
    assert np.all(updated(optax.sgd(1.0), grad, 500) == 1)


def test_equal_weights_with_equal_updates_are_not_rounded_as_one():
    """Updates of Lion have one size: a quarter of the distance to the neighbour below, here."""
    config = OptimizerConfig(name="lion", learning_rate=2**-10, weight_decay=0, schedule="constant", warmup_steps=0)
    grad = np.random.default_rng(0).uniform(0.5, 1.5, 4096).astype(np.float32)
    found = updated(make_optimizer(config, 10, {"w": "DF"}), grad, 1)
    assert set(found) == {1, 1 - 2**-8}
    assert np.mean(found < 1) == pytest.approx(1 / 4, abs=5 * np.sqrt(3 / 16 / 4096))


def first_program(mesh_dim: str, dtype: str):
    """A program in bfloat16, on a ring if the mesh has one."""
    mesh = make_mesh(mesh_dim)
    attention = "ring" if mesh.shape["sp"] > 1 else "vanilla"
    model = dataclasses.replace(CONFIG, compute_dtype="bfloat16", remat="none", attention=attention)
    optimizer = dataclasses.replace(NARROW, params_dtype=dtype)
    return make_program(model, mesh, optimizer, steps=40, seq_len=T)


def gradients_of(program, params):
    """The gradients of a batch, and the text of the lowered program that computes them."""
    weights = program.shardings.params
    gradients = make_gradients(program.model, weights, program.mesh, accumulate=1)
    in_specs = specs(weights), BATCH
    out_specs = P(), specs(weights), P(), P(), P()
    jitted = jax.jit(jax.shard_map(gradients, mesh=program.mesh, in_specs=in_specs, out_specs=out_specs))
    lowered = jitted.lower(params, *batch_on(program))
    return lowered.compile()(params, *batch_on(program))[1], lowered.as_text()


@pytest.mark.parametrize("mesh_dim", ["2,2,2,1", pytest.param("1,2,2,2", marks=pytest.mark.slow)])
def test_gradients_are_float32_and_those_of_float32_weights(mesh_dim):
    """Both kinds of weights have the same numbers. Matrices travel as they are; no shard is copied in float32."""
    program = first_program(mesh_dim, "bfloat16")
    params = init_state(program.model, program.optimizer, program.shardings, program.mesh, 0).params
    found, text = gradients_of(program, params)
    wide = jax.tree.map(lambda x: jax.device_put(x.astype(jnp.float32), x.sharding), params)
    expected, _ = gradients_of(first_program(mesh_dim, "float32"), wide)
    assert {str(x.dtype) for x in jax.tree.leaves(found)} == {"float32"}
    assert max(jax.tree.leaves(jax.tree.map(relative_error, found, expected))) <= 1e-6
    for name, x in by_name(params).items():
        assert x.dtype == (jnp.float32 if "norm" in name else jnp.bfloat16)
        shape = "x".join(map(str, x.sharding.shard_shape(x.shape)))
        assert f"tensor<{shape}xbf16>) -> tensor<{shape}xf32>" not in text, name


def run_config(folder: Path, name: str, **changes) -> Config:
    config = Config(
        model=MODEL,
        data=DataConfig(store=str(folder / "store"), source=f"jsonl:{folder}/rows.jsonl", held_out=0.2),
        optimizer=NARROW,
        run_dir=str(folder / name),
        mesh_dim="2,4,1,1",
        seq_len=64,
        batch_size=8,
        steps=4,
        checkpoint_every=2,
        eval_batches=1,
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the trained run `narrow`."""
    folder = tmp_path_factory.mktemp("narrow")
    rows = [{"text": f"{i} keys and values travel around the ring while queries stay"} for i in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train(prepare(run_config(folder, "narrow")))
    return folder


def test_a_run_learns_and_resumes_to_the_same_bits(folder):
    losses = [row["eval_loss"] for row in read_metrics(folder / "narrow") if "eval_loss" in row]
    assert losses[-1] < losses[0]
    shutil.copytree(folder / "narrow", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / "4")
    train(prepare(run_config(folder, "resumed")))
    assert saved_arrays(folder / "resumed", 4) == saved_arrays(folder / "narrow", 4)


def test_another_dtype_is_another_run(folder):
    for dtype in ("float32", "bfloat16"):
        other = run_config(folder, "narrow", optimizer=dataclasses.replace(NARROW, params_dtype=dtype))
        if dtype == "bfloat16":
            prepare(other)
            continue
        with pytest.raises(ValueError, match=r"optimizer\.params_dtype bfloat16 -> float32") as error:
            prepare(other)
        assert "continue the run with --allow=optimizer.params_dtype" in str(error.value)


@pytest.mark.slow
def test_a_run_may_go_on_in_float32_if_that_is_allowed(folder):
    """With the weights that it had."""
    shutil.copytree(folder / "narrow", folder / "wider")
    shutil.rmtree(folder / "wider" / "checkpoints" / "4")
    wide = dataclasses.replace(NARROW, params_dtype="float32")
    train(prepare(run_config(folder, "wider", optimizer=wide), allow=["optimizer.params_dtype"]))
    losses = []
    for name in ("narrow", "wider"):
        losses.append([row["loss"] for row in read_metrics(folder / name) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert read_parameters(str(folder / "wider"), 4)["embed"].dtype == np.float32


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The weights of the trained run as they are on disk."""
    return by_name(read_parameters(str(folder / "narrow"), 4))


def test_a_reader_gets_the_weights_that_were_saved(folder):
    """Models and evaluations get them in float32, a run that starts from them in its own dtype."""
    saved = stored(folder)
    assert saved["embed"].dtype == jnp.bfloat16 and saved["norm/scale"].dtype == np.float32
    model = by_name(nnx.to_pure_dict(nnx.state(load_model(folder / "narrow"))))
    assert {x.dtype for x in model.values()} == {np.dtype(np.float32)}
    for dtype in ("float32", "bfloat16"):
        optimizer = dataclasses.replace(NARROW, params_dtype=dtype)
        run = prepare(run_config(folder, f"from-{dtype}", init_from=str(folder / "narrow"), optimizer=optimizer))
        first = by_name(unpadded(run.first_state().params, run.program.shardings.params))
        assert first["embed"].dtype == dtype
        for name, x in saved.items():
            np.testing.assert_array_equal(np.asarray(first[name], np.float32), x.astype(np.float32))
            np.testing.assert_array_equal(np.asarray(model[name]), x.astype(np.float32))


def test_an_export_has_the_dtype_of_the_matrices(folder, tmp_path):
    exported = to_hf(folder / "narrow", tmp_path / "hf")
    assert (exported.dtype, exported.dtype_origin) == ("bfloat16", "as stored")
    tensors = TensorFolder(tmp_path / "hf")
    saved = stored(folder)
    assert set(tensors.dtypes.values()) == {"BF16"}
    np.testing.assert_array_equal(tensors.read("model.embed_tokens.weight"), saved["embed"])


def test_adapters_of_narrow_weights_train(folder):
    """Their base is read as `lora.base_dtype` says."""
    lora = LoraConfig(rank=2, base_dtype="bfloat16")
    wide = dataclasses.replace(NARROW, params_dtype="float32")
    config = run_config(folder, "adapters", init_from=str(folder / "narrow"), lora=lora, optimizer=wide)
    (frozen,) = prepare(config).frozen()
    assert {str(x.dtype) for x in jax.tree.leaves(frozen)} == {"bfloat16"}
    np.testing.assert_array_equal(np.asarray(frozen["norm"]["scale"]), stored(folder)["norm/scale"].astype("bfloat16"))
    with pytest.raises(ValueError, match=r"params_dtype=bfloat16 with lora.rank=2: .* set lora.base_dtype"):
        dataclasses.replace(config, optimizer=NARROW)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"unknown optimizer\.params_dtype 'float16'; choose float32 or bfloat16"):
        OptimizerConfig(params_dtype="float16")


def narrow_workload(offload: str = "none") -> Workload:
    workload = preset_workload("llama_7b", find_target("v5e-256"), 2**17)
    return dataclasses.replace(workload, optimizer=OptimizerConfig(params_dtype="bfloat16", offload=offload))


def test_closed_forms_count_two_bytes():
    workload = narrow_workload()
    wide = dataclasses.replace(workload, optimizer=OptimizerConfig())
    of_shard = workload.trained_params / 256
    assert state_bytes(workload) == pytest.approx(10 * of_shard)
    assert peak_bytes(wide) - peak_bytes(workload) == pytest.approx(2 * of_shard)
    assert offloaded_state(narrow_workload("moments")) == pytest.approx(8 * of_shard)
    assert offloaded_state(narrow_workload("state")) == pytest.approx(10 * of_shard)
    assert peak_bytes(narrow_workload("state")) == pytest.approx(
        peak_bytes(dataclasses.replace(wide, optimizer=OptimizerConfig(offload="state")))
    )
    assert "--params_dtype=bfloat16" in estimate_command(workload)
    with pytest.raises(ValueError, match=r"params_dtype=bfloat16 with lora\.rank=4"):
        dataclasses.replace(workload, lora=LoraConfig(rank=4)).check()


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_and_without_host_memory(tmp_path):
    """With the bits that were saved, and with losses like those of the same run on its own mesh."""
    program, state, _ = trained("1,1,1,8", "state", steps=3, dtype="bfloat16")
    logical = unpadded(state, program.shardings)
    saving = Checkpoints(tmp_path, program.state, program.shardings, Keep())
    saving.save(state)
    saving.close()
    losses = []
    for mesh_dim, offload in (("1,1,1,8", "state"), ("1,2,2,2", "none"), ("1,2,2,2", "state")):
        other, _, _ = trained(mesh_dim, offload, steps=0, dtype="bfloat16")
        restoring = Checkpoints(tmp_path, other.state, other.shardings, Keep())
        restored = restoring.restore(3)
        restoring.close()
        assert same_bits(unpadded(restored, other.shardings), logical)
        losses.append(float(other.step(restored, *batch_on(other))[1]["loss"]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@on_tpu
@pytest.mark.slow
def test_a_compiled_step_has_no_float32_weights():
    """Its arguments are two bytes a parameter smaller, with the padding of shards, and its temporaries no larger."""
    model = preset_config("llama_7b", num_layers=2)
    target = find_target("v5e:2x2")
    wide, _ = Workload(model, target, "1,4,1,1", 2**12, batch_size=4).with_kernel()
    narrow = dataclasses.replace(wide, optimizer=OptimizerConfig(params_dtype="bfloat16"))
    before, after = compile_apart(wide), compile_apart(narrow)
    saved = 2 * wide.trained_params / 4
    assert before.state_bytes - after.state_bytes == pytest.approx(saved, rel=0.02)
    assert after.state_bytes == pytest.approx(state_bytes(narrow), rel=0.02)
    assert before.peak_bytes - after.peak_bytes >= 0.99 * saved
