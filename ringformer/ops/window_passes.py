"""The forward and the backward pass of attention within a window of the sequence, on one device.

A query sees the last W keys. With parts of L tokens (`layouts.py`), it sees keys of its own part and of the
H = ceil((W - 1) / L) parts before it. So keys travel along the sequence, not around the ring: at hop t, each part
holds the keys of the part t before it, and the mask depends only on t.

    zigzag, hop     rank 0     rank 1     rank 2
                  .-> low  ----> low  ----> low ---.      one permute to the next rank and one to the previous;
                  '-- high <---- high <---- high <-'      on the first and the last rank, a part passes to the other

No query sees keys that passed from the end of the sequence to its beginning, but their gradients travel on with them.

    forward     the rank's own parts first, then hops 1 .. H; a hop starts before the block that hides it.
    backward    hops 1 .. H, then the own parts. The gradients of keys follow them one hop behind, and return from part
                H at once while each rank computes its own parts.

The last hop moves only the tokens that the window reaches. First tokens of the sequence that every query sees
(`attend_first`) are one more block, whose mask leaves out what the window has. All ranks gather the first tokens of
every rank, and keep those of rank 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringformer.ops import layouts
from ringformer.ops.attention import Attention
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.work_list import AxisChunks, WorkList, cut_axis, make_first_keys_work_list, make_window_work_list

TILE = 128
"""Tokens of which the window's share of an earlier part is a multiple, if the kernel has no chunks."""


def window_forward(attention: Attention, rank: jax.Array, state: Softmax, queries: Queries, keys: Keys) -> Softmax:
    """Add the keys of the window, and the first keys of the sequence, to the running softmax of every query."""
    line = Line(attention, rank, queries, keys)

    def step(t, carry):
        state, arrived = carry
        arriving = line.next_keys(arrived, t)
        return attention.blocks.forward(state, queries, arrived, line.work_list(t)), arriving

    arriving = line.next_keys(keys, 0)
    state = attention.blocks.forward(state, queries, keys, line.work_list(0))
    state, _ = line.each_hop(step, (state, arriving))
    if attention.mask.attend_first:
        state = attention.blocks.forward(state, queries, line.first_keys(keys), line.first_work_list())
    return state


def window_backward(
    attention: Attention, rank: jax.Array, dq: jax.Array, queries: Queries, keys: Keys, rows: Cotangents
) -> tuple[jax.Array, KeyGradients]:
    """Add to dq, and return the gradients of the rank's own keys, summed over all ranks."""
    line = Line(attention, rank, queries, keys)

    def step(t, carry):
        dq, dkeys, arrived = carry
        arriving = line.next_keys(arrived, t)
        behind = line.moved(dkeys, 1)
        dq, share = attention.blocks.backward(dq, queries, arrived, rows, line.work_list(t))
        if behind is not None:
            share = line.with_last(behind, share)
        return dq, share, arriving

    dq, dkeys, _ = line.each_hop(step, (dq, None, line.next_keys(keys, 0)))
    returned = line.moved(dkeys, -line.hops)
    of_first = None
    if attention.mask.attend_first:
        dq, of_first = attention.blocks.backward(dq, queries, line.first_keys(keys), rows, line.first_work_list())
        of_first = line.first_gradients(of_first)
    dq, own = attention.blocks.backward(dq, queries, keys, rows, line.work_list(0))
    if returned is not None:
        own = line.with_last(own, returned)
    if of_first is not None:
        own = line.with_first(own, of_first)
    return dq, own


class Line:
    """The parts of the sequence in their order, each with the keys of an earlier part, from the view of one rank."""

    def __init__(self, attention: Attention, rank: jax.Array, queries: Queries, keys: Keys):
        assert attention.mask.window is not None
        ring = attention.ring
        self.attention = attention
        self.ring = ring
        self.rank = rank
        self.window: int = attention.mask.window
        self.T = queries.q.shape[3]
        self.S = keys.kv.shape[3]
        self.stored: int = self.S // ring.parts
        """Keys of a part, with those that fill up its last chunk."""
        self.part: int = self.stored - attention.key_filler
        """Tokens of a part."""
        self.parts_before: list[jax.Array] = layouts.parts_before(ring.layout, ring.size, rank)
        self.hops: int = min(-(-(self.window - 1) // self.part), ring.parts * ring.size - 1)
        """Hops that keys make along the sequence, from part to part, to fill the window."""

    def each_hop(self, step: Callable[..., Any], carry: Any) -> Any:
        """Run `step(t, carry)` for hops 1, 2, ..., H. Every query sees all keys of the hops before H - 1, so these are
        one loop, whose t is traced; hop 1 starts the carry."""
        loop = range(2, self.hops - 1)
        for t in range(1, self.hops + 1):
            if t not in loop:
                carry = step(t, carry)
            elif t == loop.start:
                carry = lax.fori_loop(loop.start, loop.stop, step, carry)
        return carry

    def work_list(self, t: int | jax.Array) -> WorkList:
        """Make the chunk pairs of hop t; 0: those of the rank's own parts."""
        q = self.attention.cut_queries(self.T)
        first = self.stored - self.reach if self._is_last(t) else 0
        k = self.attention.cut_keys(self.S, first, self.stored)
        if not isinstance(t, int):
            return make_window_work_list(q, k, None, None, [before >= t for before in self.parts_before])
        has_keys = [True if t == 0 else before >= t for before in self.parts_before]
        return make_window_work_list(q, k, t * self.part, self.window, has_keys)

    @property
    def reach(self) -> int:
        """Last tokens of a part, in whole chunks, that the window reaches at the last hop."""
        tokens = self.window - 1 - (self.hops - 1) * self.part + self.attention.key_filler
        chunk = self.attention.chunk(self.S, self.attention.blocks.k_chunk)
        if self.attention.blocks.code.whole_parts:
            chunk = TILE
        return min(-(-tokens // chunk) * chunk, self.stored)

    def _is_last(self, t: int | jax.Array) -> bool:
        return isinstance(t, int) and 0 < t == self.hops

    def next_keys(self, keys: Keys, t: int | jax.Array) -> Keys | None:
        """Send the keys of hop t to the next parts, and receive those of hop t + 1; None after the last hop."""
        if isinstance(t, int) and t == self.hops:
            return None
        if isinstance(t, int) and t + 1 == self.hops:
            keys = jax.tree.map(lambda x: self._of_parts(x, lambda part, axis: _last(part, self.reach, axis)), keys)
        return self.moved(keys, 1)

    def moved(self, tree: Any, by: int) -> Any:
        """Move each part of every leaf to the place of the part `by` parts later (`layouts.part_moves`)."""
        return jax.tree.map(lambda x: self._moved(x, by), tree)

    def _moved(self, x: jax.Array, by: int) -> jax.Array:
        ring = self.ring
        axis = _tokens(x)
        parts = jnp.split(x, ring.parts, axis)
        arrived: dict[int, jax.Array] = {}
        for (source, target), moves in layouts.part_moves(ring.layout, ring.size, by).items():
            came = parts[source]
            if any(a != b for a, b in moves):
                came = lax.ppermute(came, ring.axis_name, ring.devices(moves))
            if target in arrived:
                came = jnp.where(jnp.isin(self.rank, np.array([b for _, b in moves])), came, arrived[target])
            arrived[target] = came
        return jnp.concatenate([arrived[part] for part in range(ring.parts)], axis)

    def with_last(self, sums: KeyGradients, shares: KeyGradients) -> KeyGradients:
        """Add gradients of the last tokens of each part."""

        def add(x, share):
            more = (x.shape[_tokens(x)] - share.shape[_tokens(x)]) // self.ring.parts
            return x + self._of_parts(share, lambda part, axis: _padded(part, axis, more, 0))

        return jax.tree.map(add, sums, shares)

    def with_first(self, sums: KeyGradients, shares: KeyGradients) -> KeyGradients:
        """Add gradients of the first tokens of the shard."""
        return jax.tree.map(
            lambda x, share: x + _padded(share, _tokens(x), 0, x.shape[_tokens(x)] - share.shape[_tokens(x)]),
            sums,
            shares,
        )

    def _of_parts(self, x: jax.Array, function) -> jax.Array:
        """Apply `function(part, axis)` to each part of x."""
        axis = _tokens(x)
        return jnp.concatenate([function(part, axis) for part in jnp.split(x, self.ring.parts, axis)], axis)

    # --- the first tokens of the sequence ---------------------------------------------------------------------------

    def first_keys(self, keys: Keys) -> Keys:
        """Gather the first keys of every rank, in whole chunks, and return those of rank 0."""
        first = jax.tree.map(lambda x: lax.slice_in_dim(x, 0, self._first_cut.length, axis=_tokens(x)), keys)
        if self.ring.size == 1:
            return first
        gathered = self.ring.gathered(first)
        return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, self._first_cut.length, axis=_tokens(x)), gathered)

    def first_work_list(self) -> WorkList:
        """Make the chunk pairs of the first keys of the sequence, without those of the window."""
        q = self.attention.cut_queries(self.T)
        starts = [before * self.part for before in self.parts_before]
        return make_first_keys_work_list(q, self._first_cut, starts, self.window)

    def first_gradients(self, shares: KeyGradients) -> KeyGradients:
        """Sum the gradients of the first keys over the ranks; the sums are on rank 0, and zeros elsewhere."""
        if self.ring.size == 1:
            return shares
        more = (self.ring.size - 1) * self._first_cut.length
        return self.ring.scattered(jax.tree.map(lambda x: _padded(x, _tokens(x), 0, more), shares))

    @property
    def _first_cut(self) -> AxisChunks:
        first = self.attention.mask.attend_first
        lanes = self.attention.blocks.code.lanes
        chunk = min(self.attention.chunk(self.S, self.attention.blocks.k_chunk), -(-first // lanes) * lanes)
        stored = first
        if lanes > 1:
            stored = -(-first // chunk) * chunk
        return cut_axis(stored, 1, chunk, stored - first)


def _tokens(x: jax.Array) -> int:
    """Return the axis of tokens: the next to last of keys, values and their gradients, the last of ids and biases."""
    return x.ndim - 1 if x.ndim == 2 else x.ndim - 2


def _last(x: jax.Array, count: int, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, x.shape[axis] - count, None, axis=axis)


def _padded(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    """Pad an axis with zeros."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = before, after
    return jnp.pad(x, padding)
