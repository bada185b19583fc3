"""Sharding of the weights for decoding: every device of (tp, fsdp, sp) holds a share of each weight, so that no weight
is gathered to decode a token.

A matrix keeps its dimension D whole and is cut along the other dimension; heads and their features count as one
dimension. tp cuts heads and feed-forward features, as in training; then (fsdp, sp) cut each tp rank's part. If tp has
more ranks than there are key heads, each rank holds a copy of the head that it reads. The vocabulary is cut over all
three axes. Padding is zero. Vectors are replicated.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.share_products import ALL, REST
from ringformer.parallel.gather_weight import GATHER
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.parallel.weight_sharding import TENSOR_PARALLEL, WeightSharding


@dataclass(frozen=True)
class WeightShare:
    """Sharding of one parameter. It cuts a device's share from a tp rank's part, and gathers the part from the
    shares."""

    shape: tuple[int, ...]  # of a tp rank's part of one layer, for example [D, h, d]
    dim: int  # dimension of the matrix that is cut: 0, or 1 if D is its first dimension
    layers: int | None  # size of the leading dimension of stacked layers; None: not stacked
    axes: tuple[str, ...]  # axes that cut the part; (): none, for vectors, biases and scales of heads [H, d]
    shards: int  # number of shares over `axes`
    dtype: DTypeLike

    @property
    def size(self) -> int:
        """Size of the cut dimension of a part, without padding."""
        return math.prod(self.shape) // math.prod(self.matrix(1))

    @property
    def width(self) -> int:
        """Size of the cut dimension of a share."""
        return -(-self.size // self.shards)

    def matrix(self, cut: int) -> tuple[int, int]:
        """Return the shape of the matrix if its cut dimension has size `cut`."""
        if self.dim == 1:
            return self.shape[0], cut
        return cut, self.shape[-1]

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Return the global array, the concatenation of all shares: each tp rank's part has its own padding."""
        shape = self.shape
        if self.axes:
            shape = self.matrix(self.width * math.prod(mesh.shape[axis] for axis in ALL))
        elif len(self.shape) > 1:
            shape = (self.shape[0] * mesh.shape["tp"], *self.shape[1:])
        if self.layers is not None:
            shape = (self.layers, *shape)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=NamedSharding(mesh, self.spec))

    @property
    def spec(self) -> P:
        """Mesh axes of each dimension of the global array."""
        dims: list[Any] = [None] * len(self.shape)
        if self.axes:
            dims = [None, None]
            dims[self.dim] = ALL
        elif len(self.shape) > 1:
            dims[0] = "tp"
        if self.layers is not None:
            dims = [None, *dims]
        return P(*dims)

    def cut(self, whole: jax.Array) -> jax.Array:
        """Cut this device's share from its tp part of one layer's parameter (inside `shard_map`)."""
        if whole.shape != self.shape:  # more key heads than this rank reads
            dim = whole.ndim - 2
            head = lax.axis_index("tp") * whole.shape[dim] // lax.axis_size("tp")
            whole = lax.dynamic_slice_in_dim(whole, head, 1, axis=dim)
        if not self.axes:
            return whole
        padding = [(0, 0), (0, 0)]
        padding[self.dim] = 0, self.width * self.shards - self.size
        padded = jnp.pad(whole.reshape(self.matrix(-1)), padding)
        start = lax.axis_index(self.axes) * self.width
        return lax.dynamic_slice_in_dim(padded, start, self.width, axis=self.dim)

    def gather(self, share: jax.Array) -> jax.Array:
        """Gather the tp part of one layer's parameter from the devices' shares (inside `shard_map`)."""
        if not self.axes:
            return share
        with jax.named_scope(GATHER):
            padded = lax.all_gather(share, self.axes, axis=self.dim, tiled=True, to="invarying")
        return lax.slice_in_dim(padded, 0, self.size, axis=self.dim).reshape(self.shape)


def weight_shares(config: DecoderConfig, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Return a tree with a `WeightShare` for each parameter of a `Decoder`. Matrices have the compute dtype."""
    tp = mesh.shape["tp"]
    rest = math.prod(mesh.shape[axis] for axis in REST)

    def size_on_rank(letter: str) -> int:
        size = config.sizes[letter]
        return max(1, size // tp) if letter in TENSOR_PARALLEL else size

    def share(letters: str, x: jax.ShapeDtypeStruct) -> WeightShare:
        layers = x.shape[0] if len(x.shape) > len(letters) else None
        part = tuple(size_on_rank(letter) for letter in letters)
        if not {"D", "V"} & set(letters) or len(letters) == 1:  # biases, and scales of norms
            return WeightShare(part, 0, layers, (), 1, jnp.float32)
        dim = 1 if letters[0] == "D" else 0
        dtype = jnp.dtype(config.compute_dtype)
        if "V" in letters:
            return WeightShare(part, dim, layers, ALL, tp * rest, dtype)
        return WeightShare(part, dim, layers, REST, rest, dtype)

    _, shapes, letters = abstract_model(config)
    return jax.tree.map(share, letters, shapes)


def make_reshard(shard: WeightSharding, share: WeightShare, mesh: Mesh) -> jax.stages.Wrapped:
    """Return the jitted `reshard(parameter) -> shares`, which gathers one layer of the trainer's shards at a time."""

    def one(x: jax.Array) -> jax.Array:
        whole = shard.gather(x, share.dtype)
        if not share.axes and shard.zero_axes:  # equal on all devices that gathered it
            whole = lax.pmax(whole, shard.zero_axes)
        return share.cut(whole)

    each = one if share.layers is None else partial(lax.map, one)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(shard.spec,), out_specs=share.spec))


def reshard(config: DecoderConfig, params: Any, mesh: Mesh) -> Any:
    """Return the shares of all parameters. Each matrix is deleted before the next one is resharded, so that only one
    matrix at a time is in memory twice."""

    def one(x: jax.Array, shard: WeightSharding, share: WeightShare) -> jax.Array:
        shares = jax.block_until_ready(make_reshard(shard, share, mesh)(x))
        if share.axes:
            x.delete()
        return shares

    return jax.tree.map(one, params, weight_shardings(config, mesh), weight_shares(config, mesh))
