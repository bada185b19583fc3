"""Head exchange: neighbours trade tokens for heads around attention (DeepSpeed-Ulysses; with a ring: USP).

Each `ulysses` = u neighbours on the mesh axis are one rank of the ring. Before attention, each of them holds T tokens
of all heads; during attention, all u T tokens of 1/u of the heads. So the ring has u times fewer hops, and its blocks
are u times longer.

    to_heads     [B, T, H, d] -> [B, u T, H / u, d]      an all-to-all among the u neighbours, tokens in their order
    to_tokens    the inverse

Each of K key heads is first copied u / gcd(u, K) times, so that u divides their number, and each device gets the key
heads that its query heads read.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from ringformer.ops.derivative_guards import unbatched
from ringformer.ops.layouts import ring_size_of


def key_copies(ulysses: int, K: int) -> int:
    """Return the copies of each of K key heads that the exchange needs."""
    return ulysses // math.gcd(ulysses, K)


class HeadExchange(NamedTuple):
    """Exchange among each `ulysses` neighbours on a mesh axis, inside `shard_map`; with 1, nothing moves."""

    axis_name: str | None
    ulysses: int = 1
    copies: int = 1
    """Copies of each key head."""

    @classmethod
    def of(cls, axis_name: str | None, ulysses: int, H: int, K: int) -> "HeadExchange":
        """Make the exchange for H query heads and K key heads. Raises ValueError if u does not divide the axis or H."""
        if axis_name is None and ulysses != 1:
            raise ValueError(f"ulysses={ulysses} exchanges heads between devices; axis_name is None")
        if axis_name is not None:
            ring_size_of(axis_name, ulysses)
        if H % ulysses:
            raise ValueError(f"ulysses={ulysses} does not divide the {H} query heads of a device")
        return cls(axis_name, ulysses, key_copies(ulysses, K))

    def unbatched(self, tree: Any) -> Any:
        """Return `tree`; where groups of devices exchange heads, `jax.vmap` over it raises a NotImplementedError."""
        if self.ulysses == 1 or self._groups is None:
            return tree
        reason = (
            f"ulysses={self.ulysses} under jax.vmap (or jax.hessian, jax.jacrev): JAX batches no collectives of groups "
            "of devices. Pass ulysses=1, or as many as the axis has devices; or loop over the batch with jax.lax.map"
        )
        return unbatched(tree, reason)

    def to_heads(self, x: Shaped[Array, "B T H *d"], tokens: int = 1, heads: int = 2) -> Shaped[Array, "B uT h *d"]:
        """Trade all heads of this device's tokens for all tokens of its heads; u divides H. `tokens` and `heads` are
        the axes."""
        return self._all_to_all(x, heads, tokens)

    def to_tokens(self, x: Shaped[Array, "B uT h *d"], tokens: int = 1, heads: int = 2) -> Shaped[Array, "B T H *d"]:
        """Undo `to_heads`."""
        return self._all_to_all(x, tokens, heads)

    def gathered(self, x: Shaped[Array, "B T"] | None) -> Shaped[Array, "B uT"] | None:
        """Gather one number per token, such as segment ids; None stays None."""
        if x is None or self.ulysses == 1:
            return x
        return lax.all_gather(x, self.axis_name, axis=1, axis_index_groups=self._groups, tiled=True)

    def summed(self, x: Float32[Array, "B uT"] | None) -> Float32[Array, "B T"] | None:
        """Transpose `gathered`: sum over the neighbours, each for its own tokens."""
        if x is None or self.ulysses == 1:
            return x
        return lax.psum_scatter(x, self.axis_name, scatter_dimension=1, axis_index_groups=self._groups, tiled=True)

    def own_heads(self, x: Float[Array, " H"] | None) -> Float[Array, " h"] | None:
        """Select the heads of this device during attention from one number per head; None stays None."""
        if x is None or self.ulysses == 1:
            return x
        h = x.shape[0] // self.ulysses
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis_name) % self.ulysses * h, h)

    def repeated(self, x: Float[Array, "B T K d"]) -> Float[Array, "B T copied d"]:
        """Copy each key head; its copies are neighbours."""
        return x if self.copies == 1 else jnp.repeat(x, self.copies, axis=2)

    def key_gradients(self, x: Float32[Array, "B uT h d"], dtype: jnp.dtype) -> Float[Array, "B T K d"]:
        """Transpose `to_heads(repeated(...))`. Gradients of copies travel in float32: rounded before they are summed,
        they would err up to 1.28 times as much."""
        if self.copies == 1:
            return self.to_tokens(x.astype(dtype))
        x = self.to_tokens(x)
        B, T, heads, d = x.shape
        return x.reshape(B, T, heads // self.copies, self.copies, d).sum(axis=3).astype(dtype)

    def _all_to_all(self, x: jax.Array, split_axis: int, concat_axis: int) -> jax.Array:
        if self.ulysses == 1:
            return x
        return lax.all_to_all(x, self.axis_name, split_axis, concat_axis, axis_index_groups=self._groups, tiled=True)

    @property
    def _groups(self) -> list[list[int]] | None:
        """Devices of each rank; None: all, which JAX can batch (`jax.vmap`), unlike groups."""
        assert self.axis_name is not None, "one device exchanges nothing"
        u = self.ulysses
        ranks = ring_size_of(self.axis_name, self.ulysses)
        return None if ranks == 1 else [list(range(first * u, (first + 1) * u)) for first in range(ranks)]


ALONE = HeadExchange(None)
"""Exchange of a device that is a rank of its own."""
