"""Sharding of the weights for decoding: every device of (tp, fsdp, sp) holds a share of each, and decoding a token
gathers none.

A matrix keeps its dimension D whole and is cut along the other one; heads and their features count as one dimension. tp
cuts heads and feed-forward features as in training, then (fsdp, sp) cut the rest. Where tp has more ranks than there
are key heads, each rank holds a copy of the head that it reads. The vocabulary is cut over all three axes. Padding is
zero. Vectors are replicated.
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
from ringformer.parallel.parameters import WeightSharding, abstract_model, weight_shardings

ALL, REST = ("tp", "fsdp", "sp"), ("fsdp", "sp")
"""Axes that cut a weight, major first; axes that cut a tp rank's part of it."""


@dataclass(frozen=True)
class WeightShare:
    """Sharding of one parameter: cuts a device's share from a tp rank's part, and gathers the part from shares."""

    letters: str
    shape: tuple[int, ...]  # of a tp rank's part of one layer, for example [D, h, d]
    layers: int | None  # size of the leading dimension of stacked layers; None: not stacked
    axes: tuple[str, ...]  # axes that cut the part; () for vectors
    shards: int  # number of shares over `axes`
    parts: int  # number of tp parts, each with its own padding; 1 if tp is among the axes
    dtype: DTypeLike

    @property
    def dim(self) -> int:
        """Index of the dimension that is cut, from the end."""
        return -1 if self.letters[0] == "D" else -2

    @property
    def size(self) -> int:
        """Size of the cut dimension of a part, without padding."""
        return math.prod(self.shape[1:] if self.dim == -1 else self.shape[:-1])

    @property
    def width(self) -> int:
        """Size of the cut dimension of a share."""
        return -(-self.size // self.shards)

    @property
    def spec(self) -> P:
        matrix = (None, ALL) if self.dim == -1 else (ALL, None)
        return P(*(None,) * (self.layers is not None), *(matrix if self.axes else (None,)))

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Global array, the concatenation of its shares."""
        shape = list(self.shape)
        if self.axes:
            cut = self.width * self.shards * self.parts
            shape = [self.shape[0], cut] if self.dim == -1 else [cut, self.shape[-1]]
        stacked = () if self.layers is None else (self.layers,)
        return jax.ShapeDtypeStruct((*stacked, *shape), self.dtype, sharding=NamedSharding(mesh, self.spec))

    def cut(self, whole: jax.Array) -> jax.Array:
        """Cut this device's share from its tp part of one layer's parameter (inside `shard_map`)."""
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
        """Gather the tp part of one layer's parameter from the devices' shares (inside `shard_map`)."""
        if not self.axes:
            return share
        with jax.named_scope(GATHER):
            padded = lax.all_gather(share, self.axes, axis=2 + self.dim, tiled=True, to="invarying")
        return lax.slice_in_dim(padded, 0, self.size, axis=2 + self.dim).reshape(self.shape)


def weight_shares(config: LlamaConfig, mesh: Mesh | AbstractMesh) -> dict:
    """Tree of a `WeightShare` for each parameter of a `Llama`. Matrices have the compute dtype."""
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
    """Tree of dtypes in which parameters are read for inference: the compute dtype, but float32 for vectors."""
    letters = abstract_model(config)[2]
    return jax.tree.map(lambda names: jnp.dtype(config.compute_dtype if len(names) > 1 else "float32"), letters)


def make_reshard(shard: WeightSharding, share: WeightShare, mesh: Mesh):
    """Return the jitted `reshard(parameter) -> shares`, which gathers one layer of the trainer's shards at a time."""

    def one(x: jax.Array) -> jax.Array:
        return share.cut(shard.gather(x, share.dtype))

    each = one if share.layers is None else partial(lax.map, one)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(shard.spec,), out_specs=share.spec))


def reshard(config: LlamaConfig, params: Any, mesh: Mesh) -> Any:
    """Return the shares of all parameters. Each matrix is deleted before the next is resharded, so that only one at a
    time is in memory twice."""

    def one(x: jax.Array, shard: WeightSharding, share: WeightShare) -> jax.Array:
        shares = jax.block_until_ready(make_reshard(shard, share, mesh)(x))
        if share.axes:
            x.delete()
        return shares

    return jax.tree.map(one, params, weight_shardings(config, mesh), weight_shares(config, mesh))


def make_gather(config: LlamaConfig, mesh: Mesh):
    """Return the `gather(name, shares)` that methods of `Llama` take."""
    shares = weight_shares(config, mesh)
    return lambda name, weights: jax.tree.map(lambda s, x: s.gather(x), shares[name], weights)


def definition(config: LlamaConfig) -> nnx.GraphDef:
    """Return the module without arrays."""
    return abstract_model(config)[0]
