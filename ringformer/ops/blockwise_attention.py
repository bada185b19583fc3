"""Attention of one shard of queries to one shard of keys, chunk by chunk, forward and backward (XLA).

Every kernel keeps this block contract: the forward adds the visiting keys to a running softmax (o, m, l). The backward
gets the FINAL maximum m and denominator l of the whole row, so probabilities are `exp(s - m) / l` and nothing needs
correction between hops. (They are not `exp(s - lse)`: where |m| is large, float32 has no digits left for log l.)

Arrays are head-major, with query heads grouped by the key head that they read (G = H // K). So GQA only makes a matmul
taller, and keys are never repeated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ringformer.ops import online_softmax
from ringformer.ops.derivative_guards import once_reversible
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.segment_pairs import pairs_of_a_segment
from ringformer.ops.varying_axes import vary_like
from ringformer.ops.work_list import ChunkPairs, WorkList


class Queries(NamedTuple):
    """A shard of queries, which stays on its rank."""

    q: Float[Array, "B K G T d"]
    segment_ids: Int[Array, "B T"] | None


class Keys(NamedTuple):
    """A shard of keys and values, in the dtype and shape in which it travels around the ring."""

    kv: Float[Array, "2 B K S d"]
    segment_ids: Int[Array, "B S"] | None
    bias: Float32[Array, "B S"] | None


class KeyGradients(NamedTuple):
    """Gradients that follow a shard of keys around the ring."""

    kv: tuple[Float32[Array, "B K S d"], Float32[Array, "B K S d"]] | Float32[Array, "2 B K S d"]
    """dk and dv, apart or stacked."""
    bias: Float32[Array, "B S"] | None


class Cotangents(NamedTuple):
    """Inputs of the backward for the queries' rows: the cotangents of the outputs, and three numbers per row.

    The numbers are m, 1/l, and delta = rowsum(o * do) - dlse; for rows without keys, m and 1/l are 0. Some kernels
    replace them by numbers of their own before the first block. `o` and `dlse` are for kernels that compute delta
    themselves.
    """

    do: Float[Array, "B K G T d"]
    rows: Float32[Array, "numbers B K G T"]
    o: Float[Array, "B K G T d"] | None = None
    dlse: Float32[Array, "B K G T"] | None = None
    """Cotangent of lse; None: lse was not requested."""


def block_forward(
    state: Softmax, queries: Queries, keys: Keys, work_list: WorkList, scale: float, softcap: float | None = None
) -> Softmax:
    """Add every visible key of `keys` to the running softmax of every query. `softcap` c: a logit s becomes
    c tanh(s / c)."""

    def chunk_pair(state, pair, masked):
        q = _take_q(queries, pair, work_list)
        k = _take_k(keys, pair, work_list)
        start = _at(work_list.q_chunks.start, pair.q)
        chunk = jax.tree.map(lambda x: _slice(x, _ROWS, start, work_list.q_chunks.size), state)
        s, _ = _logits(q, k, pair, work_list, scale, softcap, masked)
        chunk = online_softmax.update(chunk, s, k.kv[1])
        return jax.tree.map(lambda x, c: lax.dynamic_update_slice_in_dim(x, c, start, _ROWS), state, chunk)

    return _for_each_pair(chunk_pair, state, queries, keys, work_list)


def block_backward(
    dq: jax.Array,
    queries: Queries,
    keys: Keys,
    cotangents: Cotangents,
    work_list: WorkList,
    scale: float,
    softcap: float | None = None,
) -> tuple[jax.Array, KeyGradients]:
    """Add this block's share to `dq` [B, K, G, T, d] float32, and return the gradients of its keys."""

    def chunk_pair(carry, pair, masked):
        dq, dkeys = carry
        q = _take_q(queries, pair, work_list)
        k = _take_k(keys, pair, work_list)
        q_start = _at(work_list.q_chunks.start, pair.q)
        k_start = _at(work_list.k_chunks.start, pair.k)
        do = _slice(cotangents.do, _ROWS, q_start, work_list.q_chunks.size)
        m, weight, delta = _slice(cotangents.rows, _ROWS + 1, q_start, work_list.q_chunks.size)

        s, slope = _logits(q, k, pair, work_list, scale, softcap, masked)
        p = jnp.exp(s - m[..., None]) * weight[..., None]
        dv = _einsum("bkgts,bkgtd->bksd", p.astype(do.dtype), do)
        dp = _einsum("bkgtd,bksd->bkgts", do, k.kv[1])
        ds = p * (dp - delta[..., None])
        dbias = None if keys.bias is None else ds.sum(axis=(1, 2, 3))
        ds = (ds * scale if slope is None else ds * scale * slope).astype(q.q.dtype)
        dk = _einsum("bkgts,bkgtd->bksd", ds, q.q)

        dq = _add_at(dq, _einsum("bkgts,bksd->bkgtd", ds, k.kv[0]), q_start, _ROWS)
        dkv = tuple(_add_at(x, share, k_start, axis=2) for x, share in zip(dkeys.kv, (dk, dv), strict=True))
        return dq, KeyGradients(dkv, None if dbias is None else _add_at(dkeys.bias, dbias, k_start, axis=1))

    k, v = keys.kv
    dkeys = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), KeyGradients((k, v), keys.bias))
    dkeys = vary_like(dkeys, queries, keys, cotangents)
    return _for_each_pair(chunk_pair, (dq, dkeys), queries, keys, work_list)


_ROWS = 3
"""Axis of the query rows in q, o, m, l, do and dq."""


def _einsum(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _at(table, i):
    return lax.dynamic_index_in_dim(jnp.asarray(table), i, keepdims=False)


def _add_at(x, chunk, start, axis):
    size = chunk.shape[axis]
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, size, axis) + chunk, start, axis)


def _slice(x, axis, start, size):
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis)


def _take_q(queries: Queries, pair: ChunkPairs, work_list: WorkList) -> Queries:
    start = _at(work_list.q_chunks.start, pair.q)
    size = work_list.q_chunks.size
    return Queries(_slice(queries.q, _ROWS, start, size), _slice(queries.segment_ids, 1, start, size))


def _take_k(keys: Keys, pair: ChunkPairs, work_list: WorkList) -> Keys:
    start = _at(work_list.k_chunks.start, pair.k)
    size = work_list.k_chunks.size
    return Keys(
        _slice(keys.kv, 3, start, size), _slice(keys.segment_ids, 1, start, size), _slice(keys.bias, 1, start, size)
    )


def _logits(
    q: Queries,
    k: Keys,
    pair: ChunkPairs,
    work_list: WorkList,
    scale: float,
    softcap: float | None,
    masked: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the scaled logits of a chunk pair, [B, K, G, t, s] float32, -inf where the key is hidden; also the
    derivative of the soft cap, None without one.

    `masked`: an edge of the causal mask or of a window crosses the pair. Pairs that are hidden whole are in no work
    list.
    """
    s = _einsum("bkgtd,bksd->bkgts", q.q, k.kv[0]) * scale
    slope = None
    if softcap is not None:
        s, slope = online_softmax.capped(s, softcap)
    if k.bias is not None:
        s += k.bias[:, None, None, None, :]
    if masked:
        row = jnp.arange(work_list.q_chunks.size)[:, None]
        column = jnp.arange(work_list.k_chunks.size)
        mask = row + pair.offset >= column
        if work_list.window is not None:
            mask &= row + (pair.offset - work_list.window) < column
        if work_list.q_chunks.fresh.any():
            mask &= row >= _at(work_list.q_chunks.fresh, pair.q)
        if work_list.k_chunks.fresh.any():
            mask &= column >= _at(work_list.k_chunks.fresh, pair.k)
        s = jnp.where(mask, s, -jnp.inf)
    if q.segment_ids is not None and k.segment_ids is not None:
        same = q.segment_ids[:, :, None] == k.segment_ids[:, None, :]
        s = jnp.where(same[:, None, None], s, -jnp.inf)
    return s, slope


def _for_each_pair(chunk_pair, carry, queries: Queries, keys: Keys, work_list: WorkList):
    """Run `chunk_pair(carry, pair, masked)` over only the pairs that have something to compute."""
    for (pairs, length), masked in ((work_list.unmasked, False), (work_list.masked, True)):
        if len(pairs.q) == 0:
            continue
        pairs = jax.tree.map(jnp.asarray, pairs)
        if (live := pairs_of_a_segment(queries.segment_ids, keys.segment_ids, pairs, work_list)) is not None:
            live &= jnp.arange(len(pairs.q)) < length
            # The sort carries the pairs along: a gather of them would compile to hundreds of TPU instructions.
            _, *sorted_pairs = lax.sort((~live, *pairs), num_keys=1, is_stable=True)
            pairs = ChunkPairs(*sorted_pairs)
            length = live.sum()

        def body(i, carry, pairs=pairs, masked=masked):
            return chunk_pair(carry, jax.tree.map(lambda x: _at(x, i), pairs), masked)

        # The number of trips may depend on data, so the loop's name tells readers of the compiled program its bound.
        with jax.named_scope(f"at_most_{len(pairs.q)}_trips"):
            carry = lax.fori_loop(0, length, body, carry)
        if not isinstance(length, int):
            carry = once_reversible(carry, "ring_attention")
    return carry
