"""Moments in host memory: the numbers are those of moments on the devices to the bit, on any mesh, with adapters, and
after a resume on another mesh; compilers update them in place."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.estimate.workloads.programs import in_host_memory
from ringformer.estimate.workloads.targets import find_target
from ringformer.ops.layouts import permutation
from ringformer.parallel import host_memory
from ringformer.parallel.host_memory import copy_to_device, rows_at_once
from ringformer.parallel.lora import NO_ADAPTERS, LoraConfig
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import specs
from ringformer.parallel.weight_sharding import HOST_MEMORY, WeightSharding
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import is_matrix, make_optimizer
from ringformer.train.program import make_program
from ringformer.train.state import (
    TrainState,
    abstract_state,
    check_state_finite,
    init_state,
    make_init,
    marked_host_memory,
    state_shardings,
)
from ringformer.train.update import apply_update
from tests.helpers import relative_error, unpadded
from tests.hlo import on_cuda, on_tpu
from tests.train.test_step import CONFIG, T, packed_batch

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=0.5)
LETTERS = {"layers": {"wq": "DHd", "wo": "HdD", "norm": "D"}, "embed": "VD", "head": "DV"}


def same_bits(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, jax.device_get(a), jax.device_get(b))))


def memories(tree) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


@pytest.fixture
def few_rows(monkeypatch):
    """A toy's rows travel few at a time, as a large model's do."""
    monkeypatch.setattr(host_memory, "ROW_BYTES", 512)


@pytest.fixture
def layer_by_layer(monkeypatch):
    """A model's layers travel one at a time, its embedding and head whole."""
    monkeypatch.setattr(host_memory, "ROW_BYTES", 2048)


def toy(offload: str, mesh: Mesh, layers: int = 6, width: int = 16, vocabulary: int = 96, head: int = 8):
    """Optimizer and shardings of stacked layers of two shapes, matrices of many rows, and a vector that stays."""

    def sharded(dim, *shape):
        return WeightSharding(shape, None, dim, ("x",) if dim else (), mesh.size if dim else 1)

    layer = {"wq": sharded(-3, layers, width, 2, head), "wo": sharded(-1, layers, 2, head, width)}
    weights = {"layers": layer | {"norm": sharded(None, layers, width)}}
    weights |= {"embed": sharded(-2, vocabulary, width), "head": sharded(-1, width, vocabulary)}
    optimizer = make_optimizer(OPTIMIZER, 100, LETTERS)
    in_host = jax.tree.map(lambda w, of: replace(w, in_host=is_matrix(of)), weights, LETTERS)
    params = in_host if offload == "state" else weights
    moments = weights if offload == "none" else in_host
    return optimizer, state_shardings(params, optimizer, moments)


def zeros(abstract: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)


def toy_step(optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh) -> jax.stages.Wrapped:
    """A step that is given its gradients, and whether it is sound."""

    def step(state, grads, sound):
        state = marked_host_memory(state, shardings)
        params, opt_state = apply_update(optimizer, state.params, state.opt_state, grads, jnp.float32(0.7), sound)
        return TrainState(state.step + 1, params, opt_state)

    of_state = specs(shardings)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(of_state, of_state.params, P()), out_specs=of_state)
    placed = jax.tree.map(lambda w: w.named(mesh), shardings)
    return jax.jit(sharded, donate_argnums=0, out_shardings=placed)


@cache
def toy_states(offload: str) -> list[TrainState]:
    """The states of 20 steps with random gradients, the fourth of which is not sound."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer, shardings = toy(offload, mesh)
    rng = np.random.default_rng(3)
    abstract = abstract_state(shardings, optimizer, mesh)
    on_device = abstract_state(toy("none", mesh)[1], optimizer, mesh)

    def draw(params):
        drawn = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), drawn, params)

    state = zeros(abstract)._replace(params=draw(abstract.params))
    step = toy_step(optimizer, shardings, mesh)
    states = []
    for i in range(20):
        state = step(state, draw(on_device.params), jnp.bool_(i != 3))
        states.append(jax.tree.map(np.array, state))
    matrices = {"none": 0, "moments": 2, "state": 3}[offload] * 4
    kinds = memories((state.params, state.opt_state[0].mu, state.opt_state[0].nu))
    assert kinds.count(HOST_MEMORY) == matrices and len(kinds) == 15
    return states


@pytest.mark.parametrize("offload", ["moments", "state"])
def test_rows_in_host_memory_are_updated_as_on_the_device(few_rows, offload):
    """To the bit, but for matrices that are cut: XLA divides differently where a divisor has one use."""
    expected, found = toy_states("none"), toy_states(offload)
    for a, b in zip(expected, found, strict=True):
        assert same_bits((a.opt_state, a.params["layers"]), (b.opt_state, b.params["layers"]))
        assert max(jax.tree.leaves(jax.tree.map(relative_error, b.params, a.params))) < 5e-8
    assert relative_error(expected[0].params["embed"], expected[1].params["embed"]) > 1e-3
    before, after = found[2:4]
    assert same_bits((before.params, before.opt_state), (after.params, after.opt_state)), "a skipped step"


def test_as_many_rows_travel_as_fit(monkeypatch):
    stacked = [np.zeros((6, 4, 8), np.float32)] * 4
    matrix = [np.zeros((96, 4), np.float32)] * 2
    for limit, of_layers, of_matrix in [(0, 1, 8), (512, 2, 32), (1200, 3, 48), (2**20, 6, 96)]:
        monkeypatch.setattr(host_memory, "ROW_BYTES", limit)
        assert (rows_at_once(stacked, 0.5), rows_at_once(matrix, 0.5)) == (of_layers, of_matrix), limit
    assert rows_at_once([np.zeros((5, 3), np.float32)]) == 5, "no whole tiles"


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


def trained(mesh_dim: str, offload: str, lora: LoraConfig = NO_ADAPTERS, steps: int = 20):
    """The run's program, the state after the steps, and the losses."""
    devices = int(np.prod([int(n) for n in mesh_dim.split(",")]))
    mesh = make_mesh(mesh_dim, jax.devices()[:devices])
    optimizer = replace(OPTIMIZER, offload=offload)
    program = make_program(CONFIG, mesh, optimizer, steps=40, seq_len=T, lora=lora)
    order = permutation(CONFIG.layout, T, mesh.shape["sp"])
    batch = jax.tree.map(lambda x: jax.device_put(x[:, order], NamedSharding(mesh, BATCH)), packed_batch())
    params, frozen = None, []
    if lora.rank:
        params = program.lora.make_init(0)()
        frozen = [make_init(CONFIG, program.lora.frozen, mesh, 0)()]
    state = init_state(CONFIG, program.optimizer, program.shardings, mesh, 0, params)
    losses = []
    for _ in range(steps):
        state, metrics = program.step(state, batch, *frozen)
        losses.append(float(metrics["loss"]))
    return program, state, losses


@pytest.mark.slow
@pytest.mark.parametrize("lora", [NO_ADAPTERS, LoraConfig(rank=3)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("offload", ["moments", "state"])
@pytest.mark.parametrize("mesh_dim", ["1,1,1,8", "1,2,2,2"])
def test_a_run_has_the_same_bits(layer_by_layer, mesh_dim, offload, lora):
    _, expected, losses = trained(mesh_dim, "none", lora)
    _, found, same = trained(mesh_dim, offload, lora)
    assert losses[-1] < losses[0] and same == losses
    assert same_bits(found, expected)
    kinds = memories(found.opt_state)
    assert HOST_MEMORY in kinds and HOST_MEMORY not in memories(expected)
    check_state_finite(found, "here")


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh_and_without_host_memory(layer_by_layer, tmp_path):
    """Saved with moments in host memory, restored on another mesh with and without: the same bits, the same steps."""
    program, state, _ = trained("1,1,1,8", "moments", steps=3)
    logical = unpadded(state, program.shardings)
    saving = Checkpoints(tmp_path, program.state, program.shardings, Keep())
    saving.save(state)
    state, _ = program.step(state, *batch_on(program))  # donates what is being written
    saving.close()
    after = []
    for offload in ("none", "moments", "state"):
        other, _, _ = trained("1,2,2,2", offload, steps=0)
        restoring = Checkpoints(tmp_path, other.state, other.shardings, Keep())
        restored = restoring.restore(3)
        restoring.close()
        assert same_bits(unpadded(restored, other.shardings), logical)
        assert (HOST_MEMORY in memories(restored.opt_state)) == (offload != "none")
        after.append(other.step(restored, *batch_on(other))[0])
    assert same_bits(after[0], after[1]) and same_bits(after[0], after[2])


def batch_on(program):
    order = permutation(CONFIG.layout, T, program.mesh.shape["sp"])
    return [jax.tree.map(lambda x: jax.device_put(x[:, order], program.batch_sharding), packed_batch())]


def test_moments_in_host_memory_must_be_finite(few_rows):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
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


@on_cuda
@pytest.mark.slow
@pytest.mark.parametrize("offload", ["moments", "state"])
def test_the_gpu_compiler_updates_host_memory_in_place(offload):
    check_in_place("8xH100", offload)
