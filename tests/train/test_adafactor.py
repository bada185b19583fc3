"""Adafactor is optax's for each layer's matrix, on shards as on one device; its small state goes to any mesh."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.estimate.choices.candidates import parts_in_host
from ringformer.estimate.closed_forms.training import memory, moment_bytes, state_bytes
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload, preset_workload
from ringformer.models.registry import preset_config
from ringformer.parallel.host_memory import device_bytes
from ringformer.parallel.lora import NO_ADAPTERS, LoraConfig
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import abstract_model, shard_weights, weight_shardings
from ringformer.parallel.weight_sharding import WeightSharding
from ringformer.runs import record
from ringformer.runs.config import OptimizerConfig
from ringformer.runs.identity import defaults
from ringformer.runs.record import RunChanged, check_run, keep_record
from ringformer.train import adafactor
from ringformer.train.matrix_layout import MatrixLayout, matrix_layout
from ringformer.train.optimizer import make_optimizer, schedule
from ringformer.train.program import make_program
from ringformer.train.state import TrainState, abstract_state, init_state, make_init, state_shardings
from tests.helpers import relative_error, unpadded
from tests.hlo import on_tpu
from tests.train.test_step import CONFIG, T
from tests.train.updates import batch_on, same_bits, toy_step

ADAFACTOR = OptimizerConfig(name="adafactor", learning_rate=0.02, weight_decay=0.5, warmup_steps=3)
LETTERS = {
    "layers": {"wq": "DHd", "wo": "HdD", "w_up": "DF", "bq": "Hd", "norm": "D"},
    "embed": "VD",
    "head": "DV",
}
SIZES = {"D": 36, "H": 4, "d": 6, "F": 24, "V": 61}
"""61 divides by nothing, and 36 not by 8: rows and columns are padded."""
LAYERS = 3
STEPS = 20


def shapes() -> dict:
    def of_each(path, letters):
        stacked = (LAYERS,) if path[0].key == "layers" else ()
        return jax.ShapeDtypeStruct((*stacked, *(SIZES[letter] for letter in letters)), jnp.float32)

    return jax.tree.map_with_path(of_each, LETTERS)


def setup(mesh_dim: str):
    """Mesh, optimizer and shardings of the toy."""
    mesh = make_mesh(mesh_dim, jax.devices()[: math.prod(map(int, mesh_dim.split(",")))])
    weights = shard_weights(shapes(), LETTERS, mesh)
    optimizer = make_optimizer(ADAFACTOR, 100, LETTERS, weights)
    return mesh, optimizer, state_shardings(weights, optimizer)


def on_mesh(logical, weights, mesh):
    """Global arrays with padding of zeros."""

    def put(x, w):
        padding = [(0, whole - size) for whole, size in zip(w.padded_shape, x.shape, strict=True)]
        return jax.device_put(np.pad(x, padding), w.named(mesh))

    return jax.tree.map(put, logical, weights)


def drawn(step: int) -> dict:
    """Parameters (step 0) or gradients, whose size rises and falls: some updates are scaled down, others are not."""
    rng = np.random.default_rng(step)
    size = np.exp(2 * np.sin(step))

    def of_each(x):
        rows = rng.standard_normal((*x.shape[:-1], 1), np.float32)
        return np.float32(size) * rows * rng.standard_normal(x.shape, np.float32)

    return jax.tree.map(of_each, shapes())


def first_state(mesh_dim: str) -> TrainState:
    mesh, optimizer, shardings = setup(mesh_dim)
    abstract = abstract_state(shardings, optimizer, mesh)
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)
    return zeros._replace(params=on_mesh(drawn(0), shardings.params, mesh))


def updated(mesh_dim: str, state: TrainState, steps: range) -> TrainState:
    """The state after updates with the gradients of these steps; the fourth one is not sound."""
    mesh, optimizer, shardings = setup(mesh_dim)
    step = toy_step(optimizer, shardings, mesh)
    for i in steps:
        state = step(state, on_mesh(drawn(i + 1), shardings.params, mesh), jnp.bool_(i != 3))
    return state


def after_steps(mesh_dim: str) -> TrainState:
    """The logical arrays of the state after all steps."""
    state = updated(mesh_dim, first_state(mesh_dim), range(STEPS))
    return unpadded(state, setup(mesh_dim)[2])


@pytest.fixture(scope="module")
def of_one_device() -> TrainState:
    return after_steps("1,1,1,1")


def largest_error(found, expected) -> float:
    return max(jax.tree.leaves(jax.tree.map(relative_error, found, expected)))


def as_matrices(params: dict) -> dict:
    """Each layer's matrices and vectors by a name of their own, with heads and their features as one dimension."""
    apart = {"embed": params["embed"], "head": params["head"]}
    wide = SIZES["H"] * SIZES["d"]
    two_dimensions = {"wq": (SIZES["D"], wide), "wo": (wide, SIZES["D"]), "bq": (wide,)}
    for name, stacked in params["layers"].items():
        for layer, x in enumerate(np.asarray(stacked)):
            apart[f"{name}{layer}"] = x.reshape(two_dimensions.get(name, x.shape))
    return apart


def test_it_is_optax_for_each_layers_matrix(of_one_device):
    """Over 20 steps; optax gets every layer apart, in two dimensions."""
    params = as_matrices(drawn(0))
    theirs = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=1),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(0.5, jax.tree.map(lambda x: x.ndim > 1, params)),
        optax.scale_by_learning_rate(schedule(ADAFACTOR, 100)),
    )
    state = theirs.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = theirs.update(jax.tree.map(lambda g: 0.7 * g, grads), state, params)
        return optax.apply_updates(params, updates), state

    for i in range(STEPS):
        if i != 3:
            params, state = step(params, state, as_matrices(drawn(i + 1)))
    assert largest_error(as_matrices(of_one_device.params), params) < 1e-6
    assert relative_error(of_one_device.params["embed"], drawn(0)["embed"]) > 0.1
    of_embed = of_one_device.opt_state[0].rows["embed"], of_one_device.opt_state[0].columns["embed"]
    for ours, optaxs in zip(of_embed, (state[0].v_col, state[0].v_row), strict=True):
        assert relative_error(ours.ravel(), optaxs["embed"]) < 1e-6


@pytest.mark.parametrize("mesh_dim", ["1,2,2,2", "1,1,1,8"])
def test_shards_train_as_one_device(mesh_dim, of_one_device):
    """Parameters and statistics; padding stays zero."""
    state = updated(mesh_dim, first_state(mesh_dim), range(STEPS))
    shardings = setup(mesh_dim)[2]
    assert any(w.shape != w.padded_shape for w in jax.tree.leaves(shardings.opt_state[0]))
    logical = unpadded(state, shardings)
    assert largest_error(logical, of_one_device) < 1e-6
    for x, w, kept in zip(*map(jax.tree.leaves, (state, shardings, logical)), strict=True):
        assert np.count_nonzero(np.asarray(x)) == np.count_nonzero(kept), w


def test_means_of_shards_are_others(of_one_device, monkeypatch):
    """The control of the test above: means of sums that each device has of its own shard are far off."""
    monkeypatch.setattr(adafactor, "lax", SimpleNamespace(psum=lax.pmean, rsqrt=lax.rsqrt))
    found = after_steps("1,1,1,8")
    assert relative_error(found.params["embed"], of_one_device.params["embed"]) > 0.01
    assert relative_error(found.opt_state[0].columns["embed"], of_one_device.opt_state[0].columns["embed"]) > 0.5


def test_an_unsound_step_changes_nothing():
    state = updated("1,2,2,2", first_state("1,2,2,2"), range(2))
    before = jax.tree.map(np.array, state)  # what the step donates
    after = updated("1,2,2,2", state, range(3, 4))
    assert same_bits((after.params, after.opt_state), (before.params, before.opt_state))


def test_a_run_resumes_on_another_mesh(of_one_device, tmp_path):
    """Cut after ten steps: the same numbers on the other mesh, whose padding is another, and the same end."""
    state = updated("1,2,2,2", first_state("1,2,2,2"), range(10))
    mesh, optimizer, shardings = setup("1,2,2,2")
    logical = unpadded(state, shardings)
    saving = Checkpoints(tmp_path, abstract_state(shardings, optimizer, mesh), shardings, Keep())
    saving.save(state)
    saving.close()
    mesh, optimizer, shardings = setup("1,1,1,8")
    restoring = Checkpoints(tmp_path, abstract_state(shardings, optimizer, mesh), shardings, Keep())
    restored = restoring.restore(10)
    restoring.close()
    assert same_bits(unpadded(restored, shardings), logical)
    end = unpadded(updated("1,1,1,8", restored, range(10, STEPS)), shardings)
    assert largest_error(end, of_one_device) < 1e-6


@pytest.mark.parametrize(
    ("letters", "rows", "columns"),
    [
        ("DHd", (-3,), (-2, -1)),
        ("HdD", (-3, -2), (-1,)),
        ("VD", (-2,), (-1,)),
        ("Hdr", (-3, -2), (-1,)),  # factors of an adapter
        ("rKd", (-3,), (-2, -1)),
        ("Kd", (-2, -1), ()),
        ("D", (-1,), ()),
    ],
)
def test_heads_and_their_features_are_one_side_of_a_matrix(letters, rows, columns):
    assert matrix_layout(letters) == MatrixLayout(rows, columns)


def statistics(program) -> int:
    """Bytes of the statistics of a program's state on a device."""
    scaling = program.state.opt_state[0]
    return device_bytes((scaling.rows, scaling.columns))


PROJECTIONS = 2 * (4096 + 4096) + 2 * (4096 + 1024)
FEEDFORWARD = 3 * (4096 + 14336)
NORM = 4096 + 1
LLAMA3_8B = 4 * (32 * (PROJECTIONS + FEEDFORWARD + 2 * NORM) + 2 * (128256 + 4096) + NORM)
"""Bytes of its statistics: a number for each row and column of a matrix. A vector has one column."""


@pytest.mark.parametrize(("mesh_dim", "rank"), [("1,1,1,1", 0), ("1,2,2,2", 0), ("1,1,1,8", 0), ("1,2,2,2", 3)])
def test_the_bytes_of_a_programs_statistics_are_those_of_the_closed_form(mesh_dim, rank):
    lora = LoraConfig(rank=rank) if rank else NO_ADAPTERS
    mesh = make_mesh(mesh_dim, jax.devices()[: math.prod(map(int, mesh_dim.split(",")))])
    program = make_program(CONFIG, mesh, ADAFACTOR, steps=40, seq_len=T, lora=lora)
    target = find_target(f"{mesh.size}xH100")
    workload = Workload(CONFIG, target, mesh_dim, T, optimizer=ADAFACTOR, lora=lora)
    assert moment_bytes(workload) == statistics(program)


def test_the_statistics_of_a_large_model_are_a_thousandth_of_its_weights():
    workload = replace(preset_workload("llama3_8b", find_target("8xH100"), 2**13), optimizer=ADAFACTOR)
    whole = replace(workload, target=find_target("1xH100"), mesh_dim="1,1,1,1")
    assert moment_bytes(whole) == LLAMA3_8B < 0.001 * 4 * workload.trained_params
    assert state_bytes(whole) == 4 * workload.trained_params + LLAMA3_8B
    mesh = make_mesh("1,1,1,8", jax.devices())
    program = make_program(workload.model, mesh, ADAFACTOR, steps=40, seq_len=2**13)
    on_ring = replace(workload, mesh_dim="1,1,1,8")
    assert LLAMA3_8B / 8 < moment_bytes(on_ring) == statistics(program) < LLAMA3_8B
    adamw = replace(on_ring, optimizer=OptimizerConfig())
    part = "parameters, optimizer and gradients"
    saved = memory(adamw)[part] - memory(on_ring)[part]
    assert saved == pytest.approx(8 * workload.trained_params / 8, rel=0.01)
    assert parts_in_host(adamw) == ("moments", "state", "all") and parts_in_host(on_ring) == ()


def trained(mesh_dim: str, rank: int = 0) -> TrainState:
    lora = LoraConfig(rank=rank) if rank else NO_ADAPTERS
    mesh = make_mesh(mesh_dim, jax.devices()[: math.prod(map(int, mesh_dim.split(",")))])
    optimizer = replace(ADAFACTOR, learning_rate=1e-3)
    program = make_program(CONFIG, mesh, optimizer, steps=40, seq_len=T, lora=lora)
    params = program.lora.make_init(0)() if rank else None
    frozen = [make_init(CONFIG, program.lora.frozen, mesh, 0)()] if rank else []
    state = init_state(CONFIG, program.optimizer, program.shardings, mesh, 0, params)
    for _ in range(STEPS):
        state, _ = program.step(state, *batch_on(program), *frozen)
    return unpadded(state, program.shardings)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_ring_trains_a_model_as_one_device(rank):
    """An element of a vector, of which the first update is the sign of its gradient, may differ with its rounding."""
    expected, found = trained("1,1,1,1", rank), trained("1,2,2,2", rank)
    assert largest_error(found.params, expected.params) < 1e-4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "muon"}, "optimizer.name=muon orthogonalises whole matrices, .* choose adamw, lion or adafactor"),
        ({"name": "adafactor", "offload": "moments"}, "optimizer.offload=moments .* optimizer.name=adafactor needs"),
        ({"name": "adafactor", "offload": "state"}, "optimizer.offload=state .* optimizer.name=adafactor needs"),
        ({"name": "adafactor", "moment_dtype": "bfloat16"}, "optimizer.moment_dtype='bfloat16' .* float32 means"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(changed, message):
    with pytest.raises(ValueError, match=message) as error:
        OptimizerConfig(**changed)
    assert "\n" not in str(error.value)


def test_a_run_does_not_resume_with_another_optimizer(tmp_path, monkeypatch):
    """Its checkpoint has other arrays; the line names both."""
    identities = {}
    for name in ("adamw", "adafactor"):
        identities[name] = {"data.tokenizer": "bytes", "optimizer.name": name}
    keep_record(tmp_path, identities["adamw"], None, {})
    monkeypatch.setattr(record, "latest_step", lambda run_dir: 5)
    line = "optimizer.name adamw -> adafactor. Choose another run_dir, or undo the change"
    with pytest.raises(RunChanged, match=line):
        check_run(tmp_path, defaults() | identities["adafactor"], 10, allow=["optimizer.name"])


def update_bytes(optimizer_name: str) -> dict[str, int]:
    """Bytes of the arrays of an update of Llama 3 8B on v5e-16, and of what its compiler takes."""
    model = preset_config("llama3_8b")
    mesh = make_mesh("1,1,1,16", find_target("v5e-16").devices())
    weights = weight_shardings(model, mesh)
    optimizer = make_optimizer(OptimizerConfig(name=optimizer_name), 100, abstract_model(model)[2], weights)
    shardings = state_shardings(weights, optimizer)
    state = abstract_state(shardings, optimizer, mesh)
    sound = jax.ShapeDtypeStruct((), jnp.bool_)
    compiled = toy_step(optimizer, shardings, mesh).lower(state, state.params, sound).compile()
    memory = compiled.memory_analysis()
    counted = device_bytes((state, state.params))
    return {"counted": counted, "arguments": memory.argument_size_in_bytes, "working": memory.temp_size_in_bytes}


@on_tpu
@pytest.mark.slow
def test_tpu_compilers_do_not_pad_statistics():
    """Whose last dimensions have size 1, and would be whole tiles; nor does the update need a copy of a weight."""
    found = update_bytes("adafactor")
    assert found["arguments"] == pytest.approx(found["counted"], abs=10_000)
    assert found["working"] < 10e6
    assert update_bytes("adamw")["counted"] - found["counted"] == pytest.approx(8 * 8.03e9 / 16, rel=0.01)


def test_an_optimizer_without_shardings_is_refused():
    with pytest.raises(ValueError, match="give make_optimizer weights"):
        make_optimizer(ADAFACTOR, 100, LETTERS)


def test_an_estimate_is_finite_where_one_row_is_huge():
    """The others' means are nothing beside it, as padding's are."""
    sharding = WeightSharding((4, 8), None, None, (), 1)
    matrix = adafactor.ShardedMatrix(matrix_layout("DF"), sharding)
    optimizer = adafactor.scale_by_adafactor({"w": matrix})
    grads = {"w": jnp.zeros((4, 8)).at[1].set(1e5)}
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    assert np.isfinite(updates["w"]).all() and np.abs(updates["w"][1]).min() > 0.1
