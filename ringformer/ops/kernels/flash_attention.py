"""Flash attention on TPU with the block contract of `ops/blockwise_attention.py`: Pallas kernels for the forward and
the backward of one shard of queries and one shard of keys.

Here `m` of the contract is in units of log 2 (`LOG_UNIT`): probabilities are 2^(s - m) / l. Chunks must be multiples of
128 tokens and must not overlap (`Ring.whole_chunks`).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float32

from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.derivative_guards import without_derivatives
from ringformer.ops.kernels.flash_backward import backward_on_chip, flash_backward
from ringformer.ops.kernels.flash_forward import flash_forward, forward_on_chip
from ringformer.ops.kernels.kernel_tools import Logits
from ringformer.ops.kernels.pair_table import PairTable, pair_tables
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.segment_pairs import live_pairs, uncut_pairs
from ringformer.ops.varying_axes import vary_like
from ringformer.ops.work_list import WorkList

SECOND = "ring_attention with kernel='pallas'", "kernel='xla'"
"""Names for an error about second derivatives: the name of this kernel, which lacks them, and that of the
alternative."""

LOG_UNIT = math.log(2.0)
"""Unit in which the kernels express logits."""

FEW_DIGITS = 2.0**10
"""Maximum m, in that unit, from which float32 has fewer than 14 binary digits left for log l. Rows reach it if a bias
masks all of their keys."""

LARGE = 1e38
"""Bias, in that unit, from which float32 arithmetic may overflow."""


@jax.enable_x64(False)  # Mosaic has no 64-bit numbers, which Python's would become
def block_forward(
    state: Softmax, queries: Queries, keys: Keys, work_list: WorkList, scale: float, softcap: float | None = None
) -> Softmax:
    """Add every visible key of `keys` to the running softmax of every query."""
    queries, keys = without_derivatives((queries, keys), *SECOND)
    shape = queries.q.shape
    cut = _groups_for_two_cores(queries)
    queries = queries._replace(q=cut(queries.q))
    state = jax.tree.map(cut, state)
    logits = _logits(scale, softcap, work_list)
    for table in _tables(queries, keys, work_list, by="q"):
        state = flash_forward(state, queries, keys, _bias(keys), table, _chunks(work_list), logits)
    return jax.tree.map(lambda x: x.reshape(*shape[:4], *x.shape[4:]), state)


def prepare(cotangents: Cotangents) -> Cotangents:
    """Fold log l into m where float32 has digits left, so that the kernel need not divide by l. Elsewhere, do and delta
    are divided by l, so do is rounded once more."""
    m, weight, delta = cotangents.rows
    has_digits = (jnp.abs(m) < FEW_DIGITS) & (weight > 0.0)
    m = jnp.where(has_digits, m - jnp.log2(weight), m)
    weight = jnp.where(has_digits, 1.0, weight)
    do = (cotangents.do * weight[..., None]).astype(cotangents.do.dtype)
    return Cotangents(do, jnp.stack([m, delta * weight]))


@jax.enable_x64(False)  # Mosaic has no 64-bit numbers, which Python's would become
def block_backward(
    dq: Float32[Array, "B K G T d"],
    queries: Queries,
    keys: Keys,
    cotangents: Cotangents,
    work_list: WorkList,
    scale: float,
    dkeys: KeyGradients | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, KeyGradients]:
    """Add this block's share to `dq`, and return the gradients of its keys, added to `dkeys`.

    Args:
      cotangents: as `prepare` returns them.
    """
    queries, keys, cotangents = without_derivatives((queries, keys, cotangents), *SECOND)
    do, rows, *_ = cotangents
    shape = queries.q.shape
    cut = _groups_for_two_cores(queries) if dkeys is None else lambda x: x
    queries = queries._replace(q=cut(queries.q))
    dq = cut(dq)
    do = cut(do)
    rows = jax.vmap(cut)(rows)
    dkv: Any = None if dkeys is None else dkeys.kv  # stacked, as this kernel returns them
    dbias = None if dkeys is None else dkeys.bias
    logits = _logits(scale, softcap, work_list)
    chunks = _chunks(work_list)
    for table in _tables(queries, keys, work_list, by="k"):
        dq, dkv, more = flash_backward(dq, dkv, queries, keys, _bias(keys), do, rows, table, chunks, logits, scale)
        more = None if more is None else more.sum(axis=1)
        dbias = more if dbias is None or more is None else dbias + more
    dq = dq.reshape(shape)
    if dkv is None:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), KeyGradients(keys.kv, keys.bias))
        return dq, vary_like(zeros, dq)
    if dkv.shape[2] > keys.kv.shape[2]:
        dkv = rearrange(dkv, "two b (k readers) s d -> two b k readers s d", readers=2).sum(axis=3)
    return dq, KeyGradients(dkv, dbias)


def _groups_for_two_cores(queries: Queries) -> Callable[[jax.Array], jax.Array]:
    """Return a function that cuts each group of query heads in two, [B, K, G, ...] -> [B, 2 K, G/2, ...], if batch and
    key heads make an odd grid, which two cores of a TPU could not share."""
    B, K, G = queries.q.shape[:3]
    if B * K % 2 == 0 or G % 2:
        return lambda x: x
    return lambda x: x.reshape(B, 2 * K, G // 2, *x.shape[3:])


@lru_cache
def vmem_bytes(heads: int, head_dim: int, chunks: tuple[int, int], dtype: Any) -> int:
    """Return the most bytes of on-chip memory that the kernels need for `heads` query heads per key head, with or
    without segment ids. A bias of keys, which no model has, needs more."""
    memories = (of(heads, head_dim, chunks, dtype, True, False) for of in (forward_on_chip, backward_on_chip))
    return max(memory.bytes for memory in memories)


def _tables(queries: Queries, keys: Keys, work_list: WorkList, by) -> list[PairTable]:
    live = live_pairs(queries.segment_ids, keys.segment_ids, work_list)
    uncut = uncut_pairs(queries.segment_ids, keys.segment_ids, work_list)
    return pair_tables(work_list, by, live, uncut)


def _bias(keys: Keys) -> Float32[Array, "B S"] | None:
    """Convert the bias to units of log 2. A bias beyond LARGE, where the conversion would overflow, is halved instead:
    exp gives the same result. Only the lse of rows that see nothing but such keys is not exact."""
    if keys.bias is None:
        return None
    bias = keys.bias
    return jnp.where(jnp.abs(bias) < LARGE, bias / LOG_UNIT, jnp.sign(bias) * LARGE + bias / 2)


def _logits(scale: float, softcap: float | None, work_list: WorkList) -> Logits:
    return Logits(scale / LOG_UNIT, None if softcap is None else softcap / LOG_UNIT, work_list.window)


def _chunks(work_list: WorkList) -> tuple[int, int]:
    return work_list.q_chunks.size, work_list.k_chunks.size
