"""Where the weights lie for decoding: every device of (tp, fsdp, sp) holds a share of each, and none is gathered for a
token.

A matrix keeps its dimension D whole and is cut along the other one, heads and their features as one. tp cuts heads and
feed-forward features as in training (of fewer key heads than ranks, each holds a copy of the one that it reads), then
(fsdp, sp) what is left; the vocabulary is cut over all three. Padding is zero. Vectors are replicated.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.models.llama_config import LlamaConfig
from ringformer.parallel.gather_weight import GATHER
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.parallel.weight_sharding import WeightSharding

ALL, REST = ("tp", "fsdp", "sp"), ("fsdp", "sp")
"""The axes over which a weight is cut, major first; those over which a tp rank's part of it is."""


@dataclass(frozen=True)
class WeightShare:
    """Of one parameter: how a device's share is cut from a tp rank's part, and that part made whole again."""

    letters: str
    shape: tuple[int, ...]  # of a tp rank's part of one layer: [D, h, d] for instance
    layers: int | None  # stacked in front; None: not stacked
    axes: tuple[str, ...]  # that the part is cut over; () for vectors
    shards: int  # over `axes`
    parts: int  # tp ranks' parts, each with padding of its own; 1 if tp is among the axes
    dtype: DTypeLike

    @property
    def dim(self) -> int:
        """Which of the two dimensions is cut, from the end."""
        return -1 if self.letters[0] == "D" else -2

    @property
    def size(self) -> int:
        """Of the cut dimension of a part, without padding."""
        return math.prod(self.shape[1:] if self.dim == -1 else self.shape[:-1])

    @property
    def width(self) -> int:
        """Of the cut dimension of a share."""
        return -(-self.size // self.shards)

    @property
    def spec(self) -> P:
        matrix = (None, ALL) if self.dim == -1 else (ALL, None)
        return P(*(None,) * (self.layers is not None), *(matrix if self.axes else (None,)))

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The global array: its shares end to end."""
        shape = list(self.shape)
        if self.axes:
            cut = self.width * self.shards * self.parts
            shape = [self.shape[0], cut] if self.dim == -1 else [cut, self.shape[-1]]
        stacked = () if self.layers is None else (self.layers,)
        return jax.ShapeDtypeStruct((*stacked, *shape), self.dtype, sharding=NamedSharding(mesh, self.spec))

    def cut(self, whole: jax.Array) -> jax.Array:
        """This device's share of one layer's parameter, which is whole but for tp (inside `shard_map`)."""
        if not self.axes:
            return whole
        if self.letters == "DKd" and whole.shape[1] > self.shape[1]:
            head = lax.axis_index("tp") * whole.shape[1] // lax.axis_size("tp")
            whole = lax.dynamic_slice_in_dim(whole, head, 1, axis=1)
        flat = whole.reshape((self.shape[0], -1) if self.dim == -1 else (-1, self.shape[-1]))
        padding = [(0, 0), (0, 0)]
        padding[self.dim] = 0, self.width * self.shards - self.size
        start = lax.axis_index(self.axes) * self.width
        return lax.dynamic_slice_in_dim(jnp.pad(flat, padding), start, self.width, axis=2 + self.dim)

    def gather(self, share: jax.Array) -> jax.Array:
        """One layer's parameter, whole but for tp, from the devices' shares (inside `shard_map`)."""
        if not self.axes:
            return share
        with jax.named_scope(GATHER):
            padded = lax.all_gather(share, self.axes, axis=2 + self.dim, tiled=True, to="invarying")
        return lax.slice_in_dim(padded, 0, self.size, axis=2 + self.dim).reshape(self.shape)


def weight_shares(config: LlamaConfig, mesh: Mesh | AbstractMesh) -> dict:
    """A `WeightShare` for each parameter, in the tree of a `Llama`'s. Matrices in the compute dtype."""
    _, shapes, letters = abstract_model(config)
    return jax.tree.map(lambda names, x: _share(names, x.shape, config, mesh), letters, shapes)


def _share(letters: str, shape: tuple[int, ...], config: LlamaConfig, mesh: Mesh | AbstractMesh) -> WeightShare:
    layers = shape[0] if len(shape) > len(letters) else None
    tp, rest = mesh.shape["tp"], math.prod(mesh.shape[axis] for axis in REST)
    if len(letters) == 1:
        return WeightShare(letters, shape[-1:], layers, (), 1, 1, jnp.float32)
    part = tuple(max(1, config.sizes[x] // tp) if x in "HKF" else config.sizes[x] for x in letters)
    axes, shards, parts = (ALL, tp * rest, 1) if "V" in letters else (REST, rest, tp)
    return WeightShare(letters, part, layers, axes, shards, parts, jnp.dtype(config.compute_dtype))


def parameter_dtypes(config: LlamaConfig) -> dict:
    """The dtype in which each parameter is read for inference: the compute dtype, float32 of vectors."""
    letters = abstract_model(config)[2]
    return jax.tree.map(lambda names: jnp.dtype(config.compute_dtype if len(names) > 1 else "float32"), letters)


def make_reshard(shard: WeightSharding, share: WeightShare, mesh: Mesh):
    """`reshard(parameter) -> its shares`, jitted: from the trainer's shards, one layer whole at a time."""

    def one(x: jax.Array) -> jax.Array:
        return share.cut(shard.gather(x, share.dtype))

    each = one if share.layers is None else partial(lax.map, one)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(shard.spec,), out_specs=share.spec))


def reshard(config: LlamaConfig, params: Any, mesh: Mesh) -> Any:
    """The shares of all parameters. Each matrix is deleted before the next is laid out, so that one at a time is there
    twice."""

    def one(x: jax.Array, shard: WeightSharding, share: WeightShare) -> jax.Array:
        shares = jax.block_until_ready(make_reshard(shard, share, mesh)(x))
        if share.axes:
            x.delete()
        return shares

    return jax.tree.map(one, params, weight_shardings(config, mesh), weight_shares(config, mesh))


def make_gather(config: LlamaConfig, mesh: Mesh):
    """The `gather(name, shares)` of a `Llama`'s methods."""
    shares = weight_shares(config, mesh)
    return lambda name, weights: jax.tree.map(lambda s, x: s.gather(x), shares[name], weights)


def definition(config: LlamaConfig) -> nnx.GraphDef:
    """The module without arrays."""
    return abstract_model(config)[0]
