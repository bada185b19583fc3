"""What tests of the state share: a model whose sizes divide by no mesh, and states that differ in every bit."""

import jax
import jax.numpy as jnp
import numpy as np

from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.models.families.llama import LlamaConfig
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import TrainState, abstract_state, state_shardings

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=36, intermediate_size=44, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10
)
OPTIMIZER = make_optimizer(OptimizerConfig(), 1000, abstract_model(CONFIG)[2])
MESHES = ("1,2,1,4", "1,1,1,1", "2,1,2,2", "1,5,1,1", "1,1,2,3")


def setup(mesh_dim: str, config: LlamaConfig = CONFIG):
    """`(mesh, shardings)` on as many of the devices as the mesh names."""
    mesh = make_mesh(mesh_dim, jax.devices()[: int(np.prod([int(n) for n in mesh_dim.split(",")]))])
    return mesh, state_shardings(weight_shardings(config, mesh), OPTIMIZER)


def logical_state(seed: int = 0) -> TrainState:
    """Random bits of finite numbers on the host, no zeros, -0.0 and numbers too small to be normal among them."""
    mesh, shardings = setup("1,1,1,1")
    rng = np.random.default_rng(seed)

    def array(x):
        if x.dtype == jnp.int32:
            return np.asarray(rng.integers(1, 1000), np.int32)
        values = rng.standard_normal(x.shape, np.float32)
        values.flat[:3] = -0.0, 1e-42, -3e38
        return values

    state = jax.tree.map(array, abstract_state(shardings, OPTIMIZER, mesh))
    return state._replace(step=np.asarray(7, np.int32))


def laid_out(state: TrainState, shardings: TrainState, mesh) -> TrainState:
    """The logical state on the devices of a mesh."""

    def put(x, target):
        padded = np.zeros(target.shape, target.dtype)
        padded[tuple(map(slice, x.shape))] = x
        return jax.make_array_from_callback(target.shape, target.sharding, lambda index: padded[index])

    return jax.tree.map(put, state, abstract_state(shardings, OPTIMIZER, mesh))


def assert_same_bits(found: TrainState, state: TrainState) -> None:
    """Of every array on every device, and zeros in the padding."""
    for x, logical in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        padded = np.zeros(x.shape, x.dtype)
        padded[tuple(map(slice, logical.shape))] = logical
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data).view(np.int32), padded[shard.index].view(np.int32))


def opened(folder, mesh_dim: str = "1,1,1,1", config: LlamaConfig = CONFIG, keep=Keep(), copies=None):
    """The checkpoints of a folder on this mesh; all are kept, if it is not said which."""
    mesh, shardings = setup(mesh_dim, config)
    return Checkpoints(folder, abstract_state(shardings, OPTIMIZER, mesh), shardings, keep, copies)


def save(folder, mesh_dim: str, *states: TrainState) -> None:
    """Save logical states from this mesh, each at its step."""
    mesh, shardings = setup(mesh_dim)
    saving = opened(folder, mesh_dim)
    for state in states:
        saving.save(laid_out(state, shardings, mesh))
    saving.close()
