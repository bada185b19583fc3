"""Arrays of a session on the devices, and how they are sharded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.inference.cache.arrays import Cache
from ringformer.inference.cache.slots import Pieces

TOKENS = P("dp", ("sp", "tp"))
"""Arrays [B, P] of a chunk, P in layout order."""


class State(NamedTuple):
    """Arrays of a session on the devices, donated from program to program."""

    cache: Cache
    logits: Any  # float32 [B, V], of the next token of each row
    lengths: Any  # int32 [B], tokens in the cache of each row


class Chunk(NamedTuple):
    """New tokens of each row (global arrays), in layout order; shorter rows are padded with position -1."""

    tokens: Any  # int32 [B, P]
    positions: Any  # int32 [B, P]
    rank_positions: Any  # the same, but replicated over tp
    last: Any  # int32 [B], the position of the last token of a row if it is in this chunk, else -1
    slots: Any  # int32 [n], the first slot that each rank of the ring writes
    targets: Any  # int32 [B, P], the token that follows each token; read by programs that compute scores
    pieces: Pieces  # of the cache


CHUNK = Chunk(TOKENS, TOKENS, P("dp", "sp"), P("dp"), P("sp"), TOKENS, Pieces(P(), P()))


class Beginning(NamedTuple):
    """The cache of one row with which all rows begin."""

    cache: Cache
    pieces: Pieces


class Scores(NamedTuple):
    """Scores of tokens given the tokens before them."""

    losses: Any  # float32, -log p in nats
    likeliest: Any  # bool, whether the token is the likeliest


class Mark(NamedTuple):
    """A place in a session to which `Session.rewind` returns."""

    lengths: list[int]
    logits: jax.Array
    cuts: int
    """Number of truncations before it."""


def as_global(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Shard an array over the mesh; every process must have the whole array."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def as_globals(arrays: Any, mesh: Mesh, specs: Any) -> Any:
    """Shard a tree of arrays over the mesh, as `as_global`."""
    return jax.tree.map(lambda x, spec: as_global(x, mesh, spec), arrays, specs)


def empty_state(abstract: State) -> State:
    """Make a state whose cache has no tokens, with these shapes, dtypes and shardings."""

    def make() -> State:
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        return empty._replace(cache=empty.cache._replace(positions=empty.cache.positions - 1))

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()


@jax.jit
def _first_scores(logits: jax.Array, tokens: jax.Array) -> Scores:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    return Scores(
        jax.nn.logsumexp(logits, axis=-1, keepdims=True) - chosen,
        logits.argmax(axis=-1, keepdims=True) == tokens[:, None],
    )


def first_scores(logits: jax.Array, tokens: np.ndarray) -> Scores:
    """Return the scores [rows, 1] of a token of each row, from the logits of the next token."""
    return Scores(*map(np.asarray, _first_scores(logits, tokens)))
