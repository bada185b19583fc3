"""Offloaded parts of the state have the same bits as on the devices: on any mesh, with adapters, and after a resume on
another mesh. Compilers update them in place."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.estimate.choices.candidates import offloading
from ringformer.estimate.closed_forms.training import host_bytes, offloaded_gradients
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.programs import (
    CHECK,
    EVALUATION,
    FIRST_STATE,
    INIT,
    TRAIN_STEP,
    in_host_memory,
)
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.smollm3 import SmolLM3Config
from ringformer.models.registry import preset_config
from ringformer.parallel import host_memory
from ringformer.parallel.gather_weight import Copy
from ringformer.parallel.host_memory import HOST_MEMORY, copy_to_device, rows_at_once
from ringformer.parallel.lora import NO_ADAPTERS, LoraConfig
from ringformer.parallel.weight_sharding import WeightSharding
from ringformer.runs.config import OptimizerConfig, check_offload
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import abstract_state, check_state_finite, make_init, state_shardings
from tests.helpers import relative_error, unpadded
from tests.hlo import on_cuda, on_tpu
from tests.train.test_step import CONFIG
from tests.train.updates import OPTIMIZER, batch_on, memories, same_bits, toy, toy_states, toy_step, trained, zeros


@pytest.fixture
def few_rows(monkeypatch):
    """A toy's rows travel few at a time, as a large model's do."""
    monkeypatch.setattr(host_memory, "ROW_BYTES", 512)


@pytest.mark.parametrize("offload", ["moments", "state", "all"])
def test_rows_in_host_memory_are_updated_as_on_the_device(few_rows, offload):
    """To the last bits: the suite's programs are not optimised, and may round sums of a product at another place."""
    expected, found = toy_states("none"), toy_states(offload)
    for a, b in zip(expected, found, strict=True):
        assert max(jax.tree.leaves(jax.tree.map(relative_error, b, a))) < 1e-7
    assert relative_error(expected[0].params["embed"], expected[1].params["embed"]) > 1e-3
    before, after = found[2:4]
    assert same_bits((before.params, before.opt_state), (after.params, after.opt_state)), "a skipped step"


def test_steps_are_counted_where_every_moment_is_in_host_memory(few_rows):
    """As adapters are, which have no vectors."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = make_optimizer(OPTIMIZER, 100, {"w": "DF"})
    weights = {"w": WeightSharding((96, 16), None, -2, ("x",), 8)}
    moments = {"w": replace(weights["w"], in_host=True)}
    counts = []
    for shardings in (state_shardings(weights, optimizer), state_shardings(weights, optimizer, moments)):
        state = zeros(abstract_state(shardings, optimizer, mesh))
        step = toy_step(optimizer, shardings, mesh)
        for _ in range(2):
            grads = {"w": jax.device_put(np.ones((96, 16), np.float32), weights["w"].named(mesh))}
            state = step(state, grads, jnp.bool_(True))
        counts.append([int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0])
    assert counts[0] == counts[1] == [2, 2]


def in_own_process(*arguments: str) -> dict:
    """Run `tests.train.updates` with a user's compiler flags, and return what it prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.train.updates", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_copy_is_read_whole_or_by_an_index():
    """By models of users' own, too: `self.embed[...]`, or `self.layers[i]`."""
    copy = Copy(jnp.arange(6).reshape(3, 2), jnp.zeros((3, 2)))
    assert copy[...].w.shape == copy[...].stand_in.shape == (3, 2)
    assert copy[1].w.tolist() == [2, 3] and copy[1].stand_in.shape == (2,)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_dim", "rank"), [("1,1,1,1", 0), ("4,1,1,1", 0), ("1,2,2,2", 3)])
def test_an_evaluation_reads_offloaded_weights(few_rows, mesh_dim, rank):
    """On one device and on copies of the model, too, where a shard varies over no axis; and with adapters."""
    lora = LoraConfig(rank=rank) if rank else NO_ADAPTERS
    found = []
    for offload in ("none", "state"):
        program, state, _ = trained(mesh_dim, offload, lora, steps=1)
        check_state_finite(state, "here")
        frozen = [make_init(CONFIG, program.lora.frozen, program.mesh, 0)()] if rank else []
        found.append(program.eval_step(program.weights(state.params, frozen), *batch_on(program)))
    for expected, same in zip(*found, strict=True):
        np.testing.assert_allclose(same, expected, rtol=1e-6)
    assert np.sum(found[0][0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_users_rows_have_the_same_bits(dtype):
    """All numbers of 20 states, whatever is offloaded and however many rows travel."""
    for of_offload in in_own_process("rows", dtype).values():
        assert of_offload == {"128": 0, "512": 0, str(2**20): 0}


def test_as_many_rows_travel_as_fit(monkeypatch):
    stacked = [np.zeros((6, 4, 8), np.float32)] * 4
    matrix = [np.zeros((96, 4), np.float32)] * 2
    for limit, of_layers, of_matrix in [(0, 1, 8), (512, 2, 32), (1200, 3, 48), (2**20, 3, 48)]:
        monkeypatch.setattr(host_memory, "ROW_BYTES", limit)
        assert (rows_at_once(stacked, 0.5), rows_at_once(matrix, 0.5)) == (of_layers, of_matrix), limit
    assert rows_at_once([np.zeros((10, 3), np.float32)]) == 5, "no whole tiles"
    lanes = [np.zeros((96, 128), np.float32)]
    assert (rows_at_once(lanes), rows_at_once(lanes, may_be_whole=False)) == (96, 48), "whole lanes"
    assert rows_at_once([np.zeros((1, 3), np.float32)]) == 1, "a single row"
    assert rows_at_once([np.zeros((101, 3), np.float32)]) == 101, "a prime number of rows"


def test_a_step_reads_weights_from_host_memory(few_rows):
    """Their copies in another dtype, rows at a time."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.random.default_rng(2).standard_normal((96, 40), np.float32)
    in_host = NamedSharding(mesh, P(None, "x"), memory_kind=HOST_MEMORY)
    copy = jax.shard_map(
        lambda x: copy_to_device(x, jnp.bfloat16), mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")
    )
    found = jax.jit(copy)(jax.device_put(x, in_host))
    assert found.dtype == jnp.bfloat16 and memories(found) == ["device"]
    np.testing.assert_array_equal(np.asarray(found), x.astype(jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (3, "float32"), (0, "bfloat16")])
@pytest.mark.parametrize("offload", ["moments", "state", "all"])
@pytest.mark.parametrize("mesh_dim", ["1,1,1,8", "1,2,2,2", "2,2,1,2"])
def test_a_run_has_the_same_bits(mesh_dim, offload, rank, dtype):
    found = in_own_process("run", mesh_dim, offload, str(rank), dtype)
    assert found.pop("in host memory") > 0
    assert found == {"state": 0, "losses": 0, "fell": 1}


GROUPED = replace(CONFIG, num_layers=6, remat_group=2)
PERIODS = SmolLM3Config(**vars(CONFIG) | {"num_layers": 6, "layer_types": "FN", "remat": "attention"})
SOME_KEPT = replace(CONFIG, remat="attention", offload=True, full_remat_layers=1)


@pytest.mark.parametrize(
    ("mesh_dim", "config"),
    [
        ("2,2,1,1", replace(CONFIG, offload=True)),
        pytest.param("2,1,1,2", replace(CONFIG, offload=True), marks=pytest.mark.slow),
        pytest.param("1,1,1,1", CONFIG, marks=pytest.mark.slow),
        pytest.param("1,2,1,2", GROUPED, marks=pytest.mark.slow),
        pytest.param("1,1,2,2", replace(GROUPED, offload=True), marks=pytest.mark.slow),
        pytest.param("2,1,1,4", PERIODS, marks=pytest.mark.slow),
        pytest.param("1,2,1,2", replace(PERIODS, offload=True), marks=pytest.mark.slow),
    ],
)
def test_gradients_in_host_memory_are_those_of_the_device(few_rows, mesh_dim, config):
    """Summed over copies of the model, of layers alone, in groups and in periods. The norm is clipped."""
    _, expected, losses = trained(mesh_dim, "none", steps=4, config=config)
    program, found, same = trained(mesh_dim, "all", steps=4, config=config)
    assert len(program.gradients_in_host) == len(jax.tree.leaves(expected.params)) - 3, "all but three vectors"
    assert max(jax.tree.leaves(jax.tree.map(relative_error, found.params, expected.params))) < 1e-6
    np.testing.assert_allclose(same, losses, rtol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", ["1,1,1,8", "1,2,2,2"])
@pytest.mark.parametrize("part", ["none", "moments", "state"])
def test_layers_that_keep_less_than_others_train_as_all(few_rows, part, mesh_dim):
    """With weights on the devices, and with copies of weights in host memory."""
    _, expected, losses = trained(mesh_dim, "none", steps=4)
    _, found, same = trained(mesh_dim, part, steps=4, config=SOME_KEPT)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, found.params, expected.params))) < 1e-6
    np.testing.assert_allclose(same, losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "accumulate", "reason"),
    [
        (replace(CONFIG, tie_embeddings=True), 1, "a tied embedding gets two gradients"),
        (CONFIG, 2, "so accumulate=2 must be 1"),
        (replace(GROUPED, num_layers=5), 1, "its groups of remat_group layers, .* are not one"),
        (SOME_KEPT, 1, "its full_remat_layers and others, are not one"),
        (replace(PERIODS, num_layers=5), 1, "the layers of this model"),
        (SimpleNamespace(), 1, "one scan over all layers"),
    ],
)
def test_gradients_that_cannot_be_in_host_memory_are_refused(config, accumulate, reason):
    with pytest.raises(ValueError, match=f"optimizer.offload=all: .*{reason}.* Choose optimizer.offload=state"):
        check_offload(OptimizerConfig(offload="all"), config, accumulate)
    check_offload(OptimizerConfig(offload="state"), config, accumulate)


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_and_without_host_memory(few_rows, tmp_path):
    """Saved with moments in host memory, restored on another mesh with and without: the same bits."""
    program, state, _ = trained("1,1,1,8", "moments", steps=3)
    logical = unpadded(state, program.shardings)
    saving = Checkpoints(tmp_path, program.state, program.shardings, Keep())
    saving.save(state)
    state, _ = program.step(state, *batch_on(program))  # donates what is being written
    saving.close()
    after = []
    for offload in ("none", "moments", "state", "all"):
        other, _, _ = trained("1,2,2,2", offload, steps=0)
        restoring = Checkpoints(tmp_path, other.state, other.shardings, Keep())
        restored = restoring.restore(3)
        restoring.close()
        assert same_bits(unpadded(restored, other.shardings), logical)
        assert (HOST_MEMORY in memories(restored.opt_state)) == (offload != "none")
        after.append(other.step(restored, *batch_on(other))[0])
    for other in after[1:]:
        assert max(jax.tree.leaves(jax.tree.map(relative_error, other, after[0]))) < 1e-6


@pytest.mark.parametrize("devices", [8, 1])
def test_moments_in_host_memory_must_be_finite(few_rows, devices):
    """In any of eight shards, or the only one, which varies over no axis."""
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=kinds, devices=jax.devices()[:devices])
    optimizer, shardings = toy("state", mesh)
    state = zeros(abstract_state(shardings, optimizer, mesh))
    check_state_finite(state, "here")
    embed = np.zeros((96, 16), np.float32)
    embed[77, 3] = np.nan
    moments = state.opt_state[0]
    bad = moments._replace(nu=moments.nu | {"embed": jax.device_put(embed, moments.nu["embed"].sharding)})
    with pytest.raises(FloatingPointError, match="the state here has numbers that are not finite"):
        check_state_finite(state._replace(opt_state=(bad, *state.opt_state[1:])), "here")


def compiled_bytes(target: str, offload: str) -> dict[str, int]:
    """Memory of the update of 32 layers, compiled for a device of a target."""
    mesh = Mesh(np.array(find_target(target).devices()), ("x",))
    sizes = {"layers": 32, "width": 4096 * mesh.size, "vocabulary": 1024 * mesh.size, "head": 1024}
    optimizer, shardings = toy(offload, mesh, **sizes)
    grads = abstract_state(toy("none", mesh, **sizes)[1], optimizer, mesh).params
    step = toy_step(optimizer, shardings, mesh)
    lowered = step.lower(abstract_state(shardings, optimizer, mesh), grads, jax.ShapeDtypeStruct((), jnp.bool_))
    if mesh.devices.flat[0].platform == "gpu":
        in_host = [w.in_host for w in jax.tree.leaves(shardings)]
        in_host_memory(lowered, in_host, in_host)
    memory = lowered.compile().memory_analysis()
    names = "temp_size", "host_temp_size", "host_argument_size", "host_alias_size"
    return {name: getattr(memory, f"{name}_in_bytes") for name in names}


def check_in_place(target: str, offload: str) -> None:
    """Nothing of the host's memory besides the state itself, and of the device's, four times the rows that travel:
    those that are here, their new numbers, and those that leave and arrive."""
    found = compiled_bytes(target, offload)
    arrays = 3 if offload == "state" else 2
    mesh_size = find_target(target).num_devices
    layers = 32 * 2 * 4096 * 2048
    embedding_and_head = 2 * 1024 * 4096 * mesh_size
    assert found["host_temp_size"] == 0
    assert found["host_argument_size"] == found["host_alias_size"] == arrays * 4 * (layers + embedding_and_head)
    assert found["temp_size"] <= 1.01 * 4 * 2 * host_memory.ROW_BYTES


@on_tpu
@pytest.mark.slow
@pytest.mark.parametrize("offload", ["moments", "state"])
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1"])
def test_tpu_compilers_update_host_memory_in_place(target, offload):
    check_in_place(target, offload)


@on_tpu
@pytest.mark.slow
@pytest.mark.parametrize("program", [TRAIN_STEP, EVALUATION, INIT, FIRST_STATE, CHECK])
def test_tpu_compilers_accept_every_program_of_an_offloaded_run(program):
    """The mesh's first device is not of the first host, and the head's shards have 125 columns: TPUs keep those
    transposed."""
    model = preset_config("llama_7b", num_layers=2)
    workload = Workload(model, find_target("v5e-256"), "1,1,1,256", 2**17).with_kernel()[0]
    estimate = compile_apart(offloading(workload, "state"), program)
    assert estimate.fits
    if program == TRAIN_STEP:
        state = 12 * workload.trained_params / 256
        assert estimate.host_bytes == pytest.approx(state, rel=0.01)


def check_gradients(target: str, **settings) -> None:
    """A compiled step has the gradients in host memory, and not on the device, where a step without them has them."""
    model = preset_config("llama3_8b", num_layers=8, **settings)
    mesh_dim = f"1,{find_target(target).num_devices},1,1"
    workload = Workload(model, find_target(target), mesh_dim, 2**13, find_target(target).num_devices).with_kernel()[0]
    without, found = (compile_apart(offloading(workload, part)) for part in ("state", "all"))
    gradients = offloaded_gradients(offloading(workload, "all"))
    more = host_bytes(offloading(workload, "all")) - host_bytes(offloading(workload, "state"))
    assert more == gradients or settings.get("offload"), "some take the place of activations"
    assert found.host_bytes - without.host_bytes == pytest.approx(more, rel=0.01)
    assert without.peak_bytes - found.peak_bytes > 0.5 * gradients


@on_cuda
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"remat_group": 2}, {"offload": True}], ids=str)
def test_the_gpu_compiler_sends_gradients_to_the_host(settings):
    check_gradients("1xH100", **settings)


@on_tpu
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"remat_group": 2}, {"offload": True}], ids=str)
def test_a_tpu_compiler_sends_gradients_to_the_host(settings):
    check_gradients("v5p:2x2x1", **settings)


@on_cuda
@pytest.mark.slow
@pytest.mark.parametrize("offload", ["moments", "state"])
def test_the_gpu_compiler_updates_host_memory_in_place(offload):
    check_in_place("8xH100", offload)
