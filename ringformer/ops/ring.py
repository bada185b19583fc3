"""A ring of ranks along a mesh axis, from the view of one rank: where the keys are, and how they reach the others."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops import layouts
from ringformer.ops.blockwise_attention import KeyGradients, Keys
from ringformer.ops.head_exchange import ALONE, HeadExchange
from ringformer.ops.layouts import Layout

RingForm = Literal["one_way", "both_ways", "gathered"]
"""Paths of the keys to the other ranks: from one neighbour, from both, or all at once (`ring_attention.py`)."""

GATHERED = "ring_gathered"
"""Name of the scope of a gathered ring's collectives."""


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, the tokens that each of them holds, and the hops between them; static and hashable."""

    axis_name: str | None
    """Mesh axis of the ring; None: one device."""
    layout: Layout = "contiguous"
    form: RingForm = "one_way"
    exchange: HeadExchange = ALONE
    """Exchange of heads among the devices of a rank."""
    rings: int = 1
    """Equal rings that the ranks of the axis form, each with a sequence of its own."""

    def __post_init__(self) -> None:
        if self.form not in get_args(RingForm):
            raise ValueError(f"unknown ring {self.form!r}; known forms: {', '.join(get_args(RingForm))}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        if self.axis_name is None:
            return 1
        return layouts.ring_size_of(self.axis_name, self.exchange.ulysses, self.rings)

    @property
    def parts(self) -> int:
        """Number of parts of a shard, each an interval of the sequence or, if striped, the whole shard."""
        return layouts.PARTS[self.layout]

    @property
    def gathers(self) -> bool:
        """True if every rank gathers all keys, which then make no hops."""
        return self.form == "gathered" and self.size > 1

    @property
    def goes_both_ways(self) -> bool:
        """True if half of the keys travels to the next rank, and half to the previous one."""
        return self.form == "both_ways" and self.size > 1

    def shift(self, tree: Any, direction: Literal[1, -1] = 1) -> Any:
        """Send every leaf to the next rank in a direction, and receive the leaves of the previous one."""
        if tree is None:
            return None
        moves = [(rank, (rank + direction) % self.size) for rank in range(self.size)]
        return lax.ppermute(tree, self.axis_name, self.devices(moves))

    def send(self, tree: Any, by: int) -> Any:
        """Send every leaf `by` ranks on, or back if it is negative; ranks that none sends to get zeros."""
        moves = [(rank, rank + by) for rank in range(self.size) if 0 <= rank + by < self.size]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, self.devices(moves)), tree)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the arrays of all ranks, stacked in the order of the ranks."""
        if self.size == 1:
            return x[None]
        return lax.all_gather(x, self.axis_name, axis_index_groups=self._peers)

    def is_earlier(self, rank: jax.Array, step: int | jax.Array, direction: Literal[1, -1] = 1) -> jax.Array:
        """Return True if the keys that arrive at a step, after so many hops, come from an earlier rank."""
        return rank >= step if direction == 1 else rank + step >= self.size

    def rank_bound_to(self, q: jax.Array, *ids: jax.Array | None) -> tuple[Any, ...]:
        """Return the rank of this device, q and segment ids, tied together so that all depend on q.

        Masks made from a plain `axis_index` depend on no traced input. Partial evaluation would therefore compute all
        masks before the loops and keep them, S x T x 4 bytes, and would run a separate ring for the ids.
        """
        if self.axis_name is None:
            return jnp.zeros((), jnp.int32), q, *ids
        rank = lax.axis_index(self.axis_name) // self.exchange.ulysses % self.size
        return lax.optimization_barrier((rank, q, *ids))

    def devices(self, moves: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (source, target) devices, in all rings, of moves between ranks; each device of a rank sends to its
        like."""
        u = self.exchange.ulysses
        moved = []
        for ring in range(self.rings):
            first = ring * self.size
            for source, target in moves:
                for i in range(u):
                    moved.append(((first + source) * u + i, (first + target) * u + i))
        return moved

    @jax.named_scope(GATHERED)
    def gathered(self, keys: Keys) -> Keys:
        """Gather the keys of all ranks, in the order of the ranks."""
        gather = partial(lax.all_gather, axis_name=self.axis_name, axis_index_groups=self._peers, tiled=True)
        ids = None if keys.segment_ids is None else gather(keys.segment_ids, axis=1)
        bias = None if keys.bias is None else gather(keys.bias, axis=1)
        return Keys(gather(keys.kv, axis=3), ids, bias)

    @jax.named_scope(GATHERED)
    def scattered(self, gradients: KeyGradients) -> KeyGradients:
        """Transpose `gathered`: sum the gradients over the ranks, each rank for its own keys."""
        sum_ = partial(lax.psum_scatter, axis_name=self.axis_name, axis_index_groups=self._peers, tiled=True)
        bias = None if gradients.bias is None else sum_(gradients.bias, scatter_dimension=1)
        return KeyGradients(jax.tree.map(lambda x: sum_(x, scatter_dimension=x.ndim - 2), gradients.kv), bias)

    @property
    def _peers(self) -> list[list[int]] | None:
        """Devices that hold the same place in every rank of a ring; None: all."""
        u = self.exchange.ulysses
        ring = self.size * u
        if u == self.rings == 1:
            return None
        peers = []
        for first in range(0, self.rings * ring, ring):
            for i in range(u):
                peers.append(list(range(first + i, first + ring, u)))
        return peers
