"""Streams: the keys of a shard that travel around the ring together, and their direction.

A ring has one stream, or two. Both ways, half of the key heads travel to the next rank and half to the previous one. If
a half would be no even share of the heads, each part of the shard is cut into two runs of tokens instead:

    by heads     a stream has its own queries, state and gradients; results are concatenated
    by tokens    a stream has all queries; two softmax states of the same rows are joined, two dq are added

No new mask arises: keys that travel the other way come from later ranks first, and a run of tokens shifts the offset.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Float32, Shaped

from ringformer.ops import online_softmax
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.online_softmax import Softmax


class Stream(NamedTuple):
    """Some heads of the keys of a shard, or some tokens of each of its parts."""

    direction: Literal[1, -1] = 1
    """1: to the next rank; -1: to the previous rank."""
    heads: slice = slice(None)
    """Key heads."""
    tokens: slice = slice(None)
    """Tokens of each part; a stream of some tokens has all heads."""

    def queries(self, q: Float[Array, "B T H d"], K: int, segment_ids: Any) -> Queries:
        """Select the queries that read these heads, of K."""
        return Queries(self._grouped(q, K), segment_ids)

    def cotangents(
        self,
        do: Float[Array, "B T H d"],
        o: Float[Array, "B T H d"],
        numbers: Float32[Array, "3 B H T"],
        dlse: Float32[Array, "B H T"] | None,
        K: int,
    ) -> Cotangents:
        """Select the rows of the queries that read these heads, of K; `numbers` as in `Cotangents`."""
        rows = rearrange(numbers, "three b (k g) t -> three b k g t", k=K)[:, :, self.heads]
        if dlse is not None:
            dlse = rearrange(dlse, "b (k g) t -> b k g t", k=K)[:, self.heads]
        return Cotangents(self._grouped(do, K), rows, self._grouped(o, K), dlse)

    def keys(
        self, k: Float[Array, "B S K d"], v: Float[Array, "B S K d"], bias: Any, segment_ids: Any, parts: int
    ) -> Keys:
        """Select the keys of this stream from a shard of so many parts."""
        kv = rearrange(jnp.stack([k, v]), "two b s k d -> two b k s d")[:, :, self.heads]
        if segment_ids is not None:
            segment_ids = self._tokens(segment_ids, parts, 1)
        if bias is not None:
            bias = self._tokens(bias, parts, 1)
        return Keys(self._tokens(kv, parts, 3), segment_ids, bias)

    def sinks(self, sinks: Float32[Array, " H"] | None, K: int) -> Float32[Array, "k G"] | None:
        """Select the sinks of the heads that read these heads, of K. Of two streams of the same rows, the first has
        them."""
        if sinks is None or self.tokens.start:
            return None
        return rearrange(sinks, "(k g) -> k g", k=K)[self.heads]

    def _grouped(self, x, K: int):
        return rearrange(x, "b t (k g) d -> b k g t d", k=K)[:, self.heads]

    def _tokens(self, x, parts: int, axis: int):
        if self.tokens == slice(None):
            return x
        split = x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])
        run = split[(slice(None),) * (axis + 1) + (self.tokens,)]
        return run.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


Streams = tuple[Stream] | tuple[Stream, Stream]


def halves_of_heads(key_heads: int, directions: tuple[Literal[1, -1], Literal[1, -1]]) -> Streams:
    """Cut an even number of key heads in two."""
    half = key_heads // 2
    return Stream(directions[0], heads=slice(0, half)), Stream(directions[1], heads=slice(half, key_heads))


def runs_of_tokens(first: int, part_length: int) -> Streams:
    """Cut each part after its `first` tokens; the two runs travel in opposite directions."""
    return Stream(1, tokens=slice(0, first)), Stream(-1, tokens=slice(first, part_length))


def with_shared_ids(streams: Streams, keys: list[Keys]) -> list[Keys]:
    """Let heads that travel in one direction use one copy of segment ids and bias, which then travels once."""
    if streams[0].direction != streams[-1].direction:
        return keys
    return [x._replace(segment_ids=keys[0].segment_ids, bias=keys[0].bias) for x in keys]


def joined_states(streams: Streams, states: list[Softmax], log_unit: float) -> Softmax:
    """Return the state of all rows; m is in units of `log_unit`."""
    if len(streams) == 1:
        return states[0]
    if _by_heads(streams):
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *states)
    return online_softmax.join(states[0], states[1], log_unit)


def joined_query_gradients(streams: Streams, shares: list[Float32[Array, "B k G T d"]]) -> Float32[Array, "B K G T d"]:
    """Return dq of all rows."""
    if len(streams) == 1:
        return shares[0]
    if _by_heads(streams):
        return jnp.concatenate(shares, axis=1)
    return shares[0] + shares[1]


def joined_key_gradients(streams: Streams, shares: list[KeyGradients], parts: int) -> KeyGradients:
    """Return dk, dv and dbias of a whole shard of so many parts."""
    if len(streams) == 1:
        return shares[0]
    kv = [x.kv for x in shares]
    biases = [x.bias for x in shares if x.bias is not None]
    if _by_heads(streams):
        joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-3), *kv)
        return KeyGradients(joined, biases[0] + biases[1] if biases else None)
    joined = jax.tree.map(lambda *x: _joined_tokens(x, parts, x[0].ndim - 2), *kv)
    return KeyGradients(joined, _joined_tokens(biases, parts, 1) if biases else None)


def _by_heads(streams: Streams) -> bool:
    return streams[0].tokens == slice(None)


def _joined_tokens(runs, parts: int, axis: int) -> Shaped[Array, "..."]:
    split = [x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :]) for x in runs]
    joined = jnp.concatenate(split, axis=axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
