"""ZeRO-3: gather sharded weights where a layer uses them, and scatter their gradients."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from ringformer.ops.varying_axes import vary_like

GATHER = "gather_weight"
SCATTER = "scatter_gradient"
"""Name scopes of the two collectives, which distinguish them in a compiled program."""


TILES = (128, 8)
"""Lanes and sublanes of a tile of a TPU's memory. XLA scatters a gradient while the device computes if every shard has
whole tiles; otherwise it may sum all of it, or scatter it synchronously."""
MOST_PADDING = 0.0235
"""Most padding of a dimension, relative to its size, to fill tiles. More would also pad the 32,000 tokens of LLaMA on
256 devices, whose sums are the same with padding."""


def padded_size(size: int, shards: int) -> int:
    """Return the size of a dimension, padded to equal shards, and these to whole tiles if `MOST_PADDING` allows it."""
    rows = -(-size // shards)
    for tile in TILES:
        in_tiles = -(-rows // tile) * tile * shards
        if in_tiles <= (1 + MOST_PADDING) * size:
            return in_tiles
    return rows * shards


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_weight(
    w: Float[Array, "..."], axes: tuple[str, ...], dim: int, size: int, dtype: DTypeLike
) -> Float[Array, "..."]:
    """Gather a weight in the compute dtype `dtype` from the devices' shards.

    The weight travels in `dtype`, or in its own if that is narrower; its gradient is summed over the devices in float32
    and scattered.

    Args:
      w: the shard. Its dimension `dim` holds 1/n of the padded size (`padded_size`), where n is the product of the
        sizes of `axes`.
      axes: mesh axes that shard the weight, major first; w varies over all of them.
      dim: the sharded dimension, negative.
      size: logical size of that dimension; padding beyond it is removed.
    """
    with jax.named_scope(GATHER):
        gathered = lax.all_gather(w.astype(narrower(w.dtype, dtype)), axes, axis=w.ndim + dim, tiled=True)
    return lax.slice_in_dim(gathered, 0, size, axis=w.ndim + dim).astype(dtype)


def narrower(a: DTypeLike, b: DTypeLike) -> DTypeLike:
    """Return the dtype of the two that takes fewer bytes."""
    return min(jnp.dtype(a), jnp.dtype(b), key=lambda dtype: dtype.itemsize)


def _forward(w, axes, dim, size, dtype):
    return gather_weight(w, axes, dim, size, dtype), None


def _backward(axes, dim, size, dtype, _, dw):
    padding = [(0, 0)] * dw.ndim
    padding[dim] = (0, padded_size(size, lax.axis_size(axes)) - size)
    dw = jnp.pad(dw.astype(jnp.float32), padding)
    with jax.named_scope(SCATTER):
        return (lax.psum_scatter(dw, axes, scatter_dimension=dw.ndim + dim, tiled=True),)


gather_weight.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copy:
    """A shard of a weight that gets no gradient itself: its float32 numbers are in host memory, or there are none."""

    w: Float[Array, "..."]
    """The weight on the device, in the compute dtype or a narrower one."""
    stand_in: Float32[Array, "..."]
    """Array of the shape of w that nothing reads, on the device or in host memory. It gets the gradient."""

    def __getitem__(self, index: Any) -> "Copy":
        """Return a part of the copy: models read a parameter as `self.embed[...]` or `self.layers[i]`."""
        return Copy(self.w[index], self.stand_in[index])


@jax.custom_vjp
def with_gradient_for(w: Float[Array, "..."], stand_in: Float32[Array, "..."]) -> Float[Array, "..."]:
    """Return w; its gradient goes to `stand_in`, which has its shape, in float32."""
    return w


def _with_forward(w, stand_in):
    return w, None


def _with_backward(_, dw):
    return None, dw.astype(jnp.float32)


with_gradient_for.defvjp(_with_forward, _with_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def stand_in(w: Float32[Array, "..."], axes: tuple[str, ...], dim: int, size: int) -> Float32[Array, "..."]:
    """Return zeros in the place of the gathered weight. Their gradient, in float32, becomes that of the shards, as the
    gradient of `gather_weight` does; arguments are as there."""
    shape = list(w.shape)
    shape[dim] = size
    return vary_like(jnp.zeros(shape, jnp.float32), w)


def _stand_in_forward(w, axes, dim, size):
    return stand_in(w, axes, dim, size), None


def _stand_in_backward(axes, dim, size, _, dw):
    return _backward(axes, dim, size, None, None, dw)


stand_in.defvjp(_stand_in_forward, _stand_in_backward)
