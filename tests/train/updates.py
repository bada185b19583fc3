"""Updates of toys and of a small model, with parts of the state in host memory.

As a process, `python -m tests.train.updates` compiles them as users' programs are, not as the suite's:

    python -m tests.train.updates rows                  # numbers of a toy's states that differ, by offload and rows
    python -m tests.train.updates rows bfloat16         # the same of weights in bfloat16
    python -m tests.train.updates run MESH OFFLOAD RANK DTYPE # those of a model's state after 20 steps
"""

import json
import sys
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.models.interface import ModelConfig
from ringformer.ops.layouts import permutation
from ringformer.parallel import host_memory
from ringformer.parallel.host_memory import HOST_MEMORY
from ringformer.parallel.lora import NO_ADAPTERS, LoraConfig
from ringformer.parallel.mesh import BATCH, make_mesh, simulate_cpu_devices
from ringformer.parallel.parameters import specs
from ringformer.parallel.weight_sharding import WeightSharding
from ringformer.runs.config import OptimizerConfig
from ringformer.train.matrix_layout import is_matrix
from ringformer.train.optimizer import make_optimizer
from ringformer.train.program import make_program
from ringformer.train.state import (
    TrainState,
    abstract_state,
    init_state,
    make_init,
    marked_host_memory,
    state_shardings,
)
from ringformer.train.update import apply_update
from tests.train.test_step import CONFIG, T, packed_batch

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=0.5)
LETTERS = {"layers": {"wq": "DHd", "wo": "HdD", "norm": "D"}, "embed": "VD", "head": "DV"}


def same_bits(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, jax.device_get(a), jax.device_get(b))))


def memories(tree) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def toy(
    offload: str, mesh: Mesh, layers: int = 6, width: int = 16, vocabulary: int = 96, head: int = 8, dtype="float32"
):
    """Optimizer and shardings of stacked layers of two shapes, matrices of many rows, and a vector that stays."""

    def sharded(dim, *shape):
        if dim is None:
            return WeightSharding(shape, None, None, (), 1)
        return WeightSharding(shape, None, dim, ("x",), mesh.size)

    layer = {"wq": sharded(-3, layers, width, 2, head), "wo": sharded(-1, layers, 2, head, width)}
    weights = {"layers": layer | {"norm": sharded(None, layers, width)}}
    weights |= {"embed": sharded(-2, vocabulary, width), "head": sharded(-1, width, vocabulary)}
    optimizer = make_optimizer(OPTIMIZER, 100, LETTERS)
    in_host = jax.tree.map(lambda w, of: replace(w, in_host=is_matrix(of)), weights, LETTERS)
    params = in_host if offload in ("state", "all") else weights
    params = jax.tree.map(lambda w, of: replace(w, dtype=dtype if is_matrix(of) else w.dtype), params, LETTERS)
    moments = weights if offload == "none" else in_host
    return optimizer, state_shardings(params, optimizer, moments)


def zeros(abstract: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)


def toy_step(optimizer: optax.GradientTransformation, shardings: TrainState, mesh: Mesh) -> jax.stages.Wrapped:
    """A step that is given its gradients, and whether it is sound."""

    def step(state, grads, sound):
        state = marked_host_memory(state, shardings)
        params, opt_state = apply_update(
            optimizer, state.params, state.opt_state, grads, jnp.float32(0.7), sound, state.step
        )
        return TrainState(state.step + 1, params, opt_state)

    of_state = specs(shardings)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(of_state, of_state.params, P()), out_specs=of_state)
    placed = jax.tree.map(lambda w: w.named(mesh), shardings)
    return jax.jit(sharded, donate_argnums=0, out_shardings=placed)


@cache
def toy_states(offload: str, dtype: str = "float32") -> list[TrainState]:
    """The states of 20 steps with random gradients, the fourth of which is not sound."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer, shardings = toy(offload, mesh, dtype=dtype)
    rng = np.random.default_rng(3)
    abstract = abstract_state(shardings, optimizer, mesh)
    on_device = abstract_state(toy("none", mesh)[1], optimizer, mesh)

    def draw(params):
        drawn = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
        return jax.tree.map(lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), drawn, params)

    state = zeros(abstract)._replace(params=draw(abstract.params))
    step = toy_step(optimizer, shardings, mesh)
    states = []
    of_grads = abstract.params if offload == "all" else on_device.params
    for i in range(20):
        state = step(state, draw(of_grads), jnp.bool_(i != 3))
        states.append(jax.tree.map(np.array, state))
    matrices = {"none": 0, "moments": 2, "state": 3, "all": 3}[offload] * 4
    kinds = memories((state.params, state.opt_state[0].mu, state.opt_state[0].nu))
    assert kinds.count(HOST_MEMORY) == matrices and len(kinds) == 15
    return states


def trained(
    mesh_dim: str,
    offload: str,
    lora: LoraConfig = NO_ADAPTERS,
    steps: int = 20,
    clip_norm: float = 0.5,
    config: ModelConfig = CONFIG,
    dtype: str = "float32",
    reduce_dtype: str = "float32",
):
    """The run's program, the state after the steps, and the losses."""
    devices = int(np.prod([int(n) for n in mesh_dim.split(",")]))
    mesh = make_mesh(mesh_dim, jax.devices()[:devices])
    optimizer = replace(OPTIMIZER, offload=offload, clip_norm=clip_norm, params_dtype=dtype, reduce_dtype=reduce_dtype)
    program = make_program(config, mesh, optimizer, steps=40, seq_len=T, lora=lora)
    order = permutation(config.layout, T, mesh.shape["sp"])
    batch = jax.tree.map(lambda x: jax.device_put(x[:, order], NamedSharding(mesh, BATCH)), packed_batch())
    params = None
    frozen = []
    if lora.rank:
        params = program.lora.make_init(0)()
        frozen = [make_init(CONFIG, program.lora.frozen, mesh, 0)()]
    state = init_state(config, program.optimizer, program.shardings, mesh, 0, params)
    losses = []
    for _ in range(steps):
        state, metrics = program.step(state, batch, *frozen)
        losses.append(float(metrics["loss"]))
    return program, state, losses


def batch_on(program):
    order = permutation(CONFIG.layout, T, program.mesh.shape["sp"])
    return [jax.tree.map(lambda x: jax.device_put(x[:, order], program.batch_sharding), packed_batch())]


def differing(a, b) -> int:
    """Numbers of two trees that differ."""
    found = jax.tree.map(lambda x, y: int((np.asarray(x) != np.asarray(y)).sum()), jax.device_get(a), jax.device_get(b))
    return sum(jax.tree.leaves(found))


def toys_that_differ(dtype: str = "float32") -> dict[str, dict[str, int]]:
    """Numbers of all states of a toy that differ from those on the devices, by what is offloaded and bytes of rows."""
    found: dict[str, dict[str, int]] = {}
    for offload in ("moments", "state", "all"):
        found[offload] = {}
        for row_bytes in (128, 512, 2**20):
            host_memory.ROW_BYTES = row_bytes
            toy_states.cache_clear()
            pairs = zip(toy_states(offload, dtype), toy_states("none", dtype), strict=True)
            found[offload][str(row_bytes)] = sum(differing(a, b) for a, b in pairs)
    return found


def run_that_differs(mesh_dim: str, offload: str, rank: str, dtype: str) -> dict[str, int]:
    """Numbers of a model's state, and losses, that differ after 20 steps; and the losses that fell. A gradient in host
    memory is summed up in another order for its norm, so nothing is clipped there."""
    host_memory.ROW_BYTES = 512
    lora = LoraConfig(rank=int(rank)) if int(rank) else NO_ADAPTERS
    clip_norm = 1e9 if offload == "all" else 0.5
    _, expected, losses = trained(mesh_dim, "none", lora, clip_norm=clip_norm, dtype=dtype)
    _, found, same = trained(mesh_dim, offload, lora, clip_norm=clip_norm, dtype=dtype)
    return {
        "state": differing(found, expected),
        "losses": sum(a != b for a, b in zip(losses, same, strict=True)),
        "fell": int(losses[-1] < losses[0]),
        "in host memory": memories(found).count(HOST_MEMORY) - memories(expected).count(HOST_MEMORY),
    }


if __name__ == "__main__":
    simulate_cpu_devices(8)
    what, *arguments = sys.argv[1:]
    print(json.dumps(toys_that_differ(*arguments) if what == "rows" else run_that_differs(*arguments)))
