"""Packed documents as rectangles, for kernels without segment ids.

If segment ids ascend along the sequence, documents are intervals of the sequence. So are the parts of a shard in the
contiguous layout and, under a causal mask, in zigzag. Two parts share at most one document, since a document with
tokens in both contains everything between them. So queries see only a rectangle of an earlier part: the rows before the
shared document's end, and the keys from its start on.

    earlier part   |.....aaaa|       later part   |aaaaaa..bbb...|      a: the shared document
    keys seen             ^^^^       rows that see ^^^^^^

A rank's own shard has many documents. If it is cut into pieces, two different pieces again see only a rectangle:

    piece 0   d                  d    diagonal: chunk pairs with segment ids (XLA)
          1   3 d                3    4 pairs of neighbours, one call with 4 times the batch
          2   2 2 d              2    2 pairs of pairs, one call
          3   2 2 3 d            1    1 pair of halves, one call
          4   1 1 1 1 d
          5   1 1 1 1 3 d
          6   1 1 1 1 2 2 d
          7   1 1 1 1 2 2 3 d
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ringformer.ops.blockwise_attention import Keys, Queries
from ringformer.ops.kernels.cudnn_shares import View

SHORTEST = 1024
"""Tokens of the shortest pieces. Longer pieces leave more work to the slow diagonal; calls for shorter pieces are slow
too."""


def shared_document(q_ids: Int[Array, "B T"], k_ids: Int[Array, "B S"]) -> View:
    """Return the view of queries on keys that all come before them, given ascending segment ids."""
    first = q_ids[:, :1]
    last = k_ids[:, -1:]
    rows = (q_ids == last).sum(axis=1)
    columns = (k_ids == first).sum(axis=1)
    return View(lengths=(rows.astype(jnp.int32), columns.astype(jnp.int32)))


def count_pieces(length: int) -> int:
    """Count the pieces of a shard of `length` tokens: the largest power of two whose pieces have at least SHORTEST."""
    pieces = 1
    while length % (2 * pieces) == 0 and length // (2 * pieces) >= SHORTEST:
        pieces *= 2
    return pieces


class Level(NamedTuple):
    """Pairs of neighbouring pieces, arranged as more rows of the batch.

    Arrays have tokens in axis 3 and the batch in axis 0; keys and values, [2, B, K, S, d], have the batch in axis 1.
    """

    pairs: int

    def later(self, x: Array) -> Array:
        """Take the later piece of each pair, [B, K, G, T, ...] -> [B * pairs, K, G, T / (2 * pairs), ...]."""
        return _take(x, 1, self.pairs)

    def put_later(self, x: Array, pieces: Array) -> Array:
        """Replace the later piece of each pair."""
        return _put(x, pieces, 1, self.pairs)

    def earlier(self, kv: Array) -> Array:
        """Take the earlier piece of each pair of keys and values."""
        return _take(kv, 0, self.pairs, batch=1)

    def put_earlier(self, kv: Array, pieces: Array) -> Array:
        return _put(kv, pieces, 0, self.pairs, batch=1)

    def rectangles(self, queries: Queries, keys: Keys) -> tuple[Array, Array, View]:
        """Return the queries of the later pieces, the keys and values of the earlier pieces, and the view of those
        queries."""
        assert queries.segment_ids is not None and keys.segment_ids is not None
        q_ids = _take(queries.segment_ids, 1, self.pairs, tokens=1)
        k_ids = _take(keys.segment_ids, 0, self.pairs, tokens=1)
        return self.later(queries.q), self.earlier(keys.kv), shared_document(q_ids, k_ids)


def levels(length: int) -> Iterator[Level]:
    """Yield the levels below the diagonal of a shard, from single pieces to halves."""
    pairs = count_pieces(length) // 2
    while pairs:
        yield Level(pairs)
        pairs //= 2


def _take(x: Array, which: int, pairs: int, tokens: int = 3, batch: int = 0) -> Array:
    x = lax.index_in_dim(_paired(x, pairs, tokens), which, tokens + 1, keepdims=False)
    x = jnp.moveaxis(x, tokens, batch + 1)
    return x.reshape(*x.shape[:batch], -1, *x.shape[batch + 2 :])


def _put(x: Array, pieces: Array, which: int, pairs: int, tokens: int = 3, batch: int = 0) -> Array:
    pieces = pieces.reshape(*pieces.shape[:batch], -1, pairs, *pieces.shape[batch + 1 :])
    pieces = jnp.moveaxis(pieces, batch + 1, tokens)
    return lax.dynamic_update_index_in_dim(_paired(x, pairs, tokens), pieces, which, tokens + 1).reshape(x.shape)


def _paired(x: Array, pairs: int, tokens: int) -> Array:
    return x.reshape(*x.shape[:tokens], pairs, 2, -1, *x.shape[tokens + 1 :])
