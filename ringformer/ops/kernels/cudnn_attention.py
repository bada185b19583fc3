"""Attention of a block by cuDNN on GPUs, with the block contract of `ops/blockwise_attention.py`.

Each pair of whole parts of a shard is one call (`cudnn_calls.py`). In a call, all keys are visible, or those that a
causal mask leaves once the queries are shifted by the offset. The indices of the parts may be data, so that calls need
no branch around them.

    forward    a call returns o and lse for only its keys: a softmax state with m = lse and l = 1, joined to the running
               state in float32.
    backward   given the FINAL o and lse of the row, each call returns its share of dq, dk, dv, rounded to the dtype of
               the inputs; the shares are added in float32.

cuDNN computes delta = rowsum(o * do) and supports no cotangent of lse. The gradients are linear in the two cotangents:
the share of dlse is ds = p * dlse, which a second call with do v^T = dlse and o = 0 computes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ringformer.ops import online_softmax
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.derivative_guards import without_derivatives
from ringformer.ops.kernels import cudnn_calls
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.varying_axes import vary_like
from ringformer.ops.work_list import AxisChunks, ChunkPairs, WorkList

SECOND = "ring_attention with kernel='cudnn'", "kernel='xla'"
"""Names, for an error, of this kernel without second derivatives and of the alternative."""

HEAD_SIZES = {8: 128, 9: 256}
"""Largest head size by the major version of a GPU's compute capability: Ampere, Hopper."""

_LARGEST, _MULTIPLE = max(HEAD_SIZES.values()), 8


def check_head_size(d: int, capability: int | None = None) -> None:
    """Raise ValueError for a head size that cuDNN's attention does not support on GPUs of this compute capability (its
    major version; None: any)."""
    largest = _LARGEST if capability is None else HEAD_SIZES.get(capability, _LARGEST)
    if d % _MULTIPLE or d > largest:
        where = "" if capability is None else f" on GPUs of compute capability {capability}"
        raise ValueError(
            f"kernel='cudnn' takes head sizes that are multiples of {_MULTIPLE}, at most {largest}{where}; "
            f"kernel='xla' takes {d}"
        )


def block_forward(state: Softmax, queries: Queries, keys: Keys, work_list: WorkList, scale: float) -> Softmax:
    """Add every visible key of `keys` to the running softmax of every query."""
    queries, keys = without_derivatives((queries, keys), *SECOND)
    K = keys.kv.shape[2]

    def call(state, pair, masked):
        moved = _moved(pair, masked)
        q = _roll(_part(queries.q, pair.q, work_list.q_chunks), moved, up=True)
        k, v = _tokens_first(_part(keys.kv, pair.k, work_list.k_chunks))
        o, lse = cudnn_calls.forward(rearrange(q, "b k g t d -> b t (k g) d"), k, v, scale, causal=masked)
        o = _roll(rearrange(o, "b t (k g) d -> b k g t d", k=K).astype(jnp.float32), moved)
        lse = _roll(rearrange(lse, "b (k g) t -> b k g t", k=K), moved)
        seen = Softmax(o, _where_hidden(moved, -jnp.inf, lse), jnp.ones_like(lse))
        rows = jax.tree.map(lambda x: _part(x, pair.q, work_list.q_chunks), state)
        return jax.tree.map(
            lambda x, part: _put(x, part, pair.q, work_list.q_chunks), state, online_softmax.join(rows, seen)
        )

    return _for_each_call(call, state, work_list)


def block_backward(
    dq: Float32[Array, "B K G T d"],
    queries: Queries,
    keys: Keys,
    cotangents: Cotangents,
    work_list: WorkList,
    scale: float,
) -> tuple[jax.Array, KeyGradients]:
    """Add this block's share to `dq`, and return the gradients of its keys."""
    queries, keys, cotangents = without_derivatives((queries, keys, cotangents), *SECOND)
    K = keys.kv.shape[2]
    m, weight, _ = cotangents.rows
    row_lse = m - jnp.log(weight)

    def call(carry, pair, masked):
        dq, dkv = carry
        moved = _moved(pair, masked)

        def rows(x):
            return _roll(_part(x, pair.q, work_list.q_chunks), moved, up=True)

        def gradients(v, o, do):
            """Compute the gradients for one cotangent, in float32."""
            q, o, do = (rearrange(rows(x), "b k g t d -> b t (k g) d") for x in (queries.q, o, do))
            gq, *gkv = cudnn_calls.backward(q, k, v, o, lse, do, scale, causal=masked)
            gq = _roll(rearrange(gq, "b t (k g) d -> b k g t d", k=K).astype(jnp.float32), moved)
            return gq, jnp.stack(gkv).swapaxes(2, 3).astype(jnp.float32)

        k, v = _tokens_first(_part(keys.kv, pair.k, work_list.k_chunks))
        lse = _part(row_lse, pair.q, work_list.q_chunks)
        lse = _roll(_where_hidden(moved, _NOTHING, lse), moved, up=True)
        lse = rearrange(lse, "b k g t -> b (k g) t")
        share, key_share = gradients(v, cotangents.o, cotangents.do)
        if cotangents.dlse is not None:
            do = _pieces(cotangents.dlse, queries.q)
            more, more_keys = gradients(_ones(v), jnp.zeros_like(do), do)
            share, key_share = share + more, key_share.at[0].add(more_keys[0])
        return (
            _put(dq, _part(dq, pair.q, work_list.q_chunks) + share, pair.q, work_list.q_chunks),
            _put(dkv, _part(dkv, pair.k, work_list.k_chunks) + key_share, pair.k, work_list.k_chunks),
        )

    dkv = vary_like(jnp.zeros(keys.kv.shape, jnp.float32), queries, keys, cotangents)
    dq, dkv = _for_each_call(call, (dq, dkv), work_list)
    return dq, KeyGradients(dkv[0], dkv[1], None)


def _for_each_call(call, carry, work_list: WorkList):
    """Run `call(carry, pair, masked)` for the pairs of a block; in a loop only if their number is data."""
    for (pairs, length), masked in ((work_list.unmasked, False), (work_list.masked, True)):
        most = len(pairs.q)

        def body(i, carry, pairs=pairs, masked=masked):
            return call(carry, ChunkPairs(*(x[i] for x in pairs)), masked)

        # The loop's name tells readers of the compiled program its bound.
        with jax.named_scope(f"at_most_{most}_trips"):
            if isinstance(length, int):
                for i in range(most):
                    carry = body(i, carry)
            else:
                carry = lax.fori_loop(0, length, body, carry)
    return carry


# --- the cotangent of lse -----------------------------------------------------------------------------------------

_PIECES = 3
"""Number of bfloat16 that hold the digits of a float32."""


def _pieces(dlse, q):
    """Write dlse as the sum of the first features of a cotangent of o, [B, K, G, T, d] in q's dtype; others are 0."""
    pieces, rest = [], dlse
    for _ in range(_PIECES):
        pieces.append(rest.astype(q.dtype))
        rest = rest - pieces[-1].astype(jnp.float32)
    return jnp.pad(jnp.stack(pieces, axis=-1), [(0, 0)] * dlse.ndim + [(0, q.shape[-1] - _PIECES)])


def _ones(v):
    """Make values of 1 in the features of `_pieces`, else 0."""
    return jnp.zeros_like(v).at[..., :_PIECES].set(1)


# --- parts of a shard, and rows moved by the offset of a mask -----------------------------------------------------

_ROWS = 3
"""Axis of the tokens in all arrays of the contract."""

_NOTHING = 1e30
"""An lse that makes a row's probabilities 0."""


def _part(x, i, chunks: AxisChunks):
    """Return part `i`, which may be data."""
    if chunks.size == x.shape[_ROWS]:
        return x
    return lax.dynamic_slice_in_dim(x, jnp.asarray(chunks.start)[i], chunks.size, _ROWS)


def _put(x, part, i, chunks: AxisChunks):
    """Replace part `i` of `x`."""
    if chunks.size == x.shape[_ROWS]:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, jnp.asarray(chunks.start)[i], _ROWS)


def _moved(pair: ChunkPairs, masked: bool) -> Int32[Array, ""] | None:
    """Return the number of rows at the start that see nothing, `moved`: row t sees columns up to t - moved. None if the
    number is statically 0."""
    offset: Any = pair.offset
    if not masked or (isinstance(offset, np.integer) and offset == 0):
        return None
    return -jnp.asarray(offset)


def _roll(x, moved, up: bool = False):
    """Roll rows. With `up`, a plain causal mask then fits the rows, and rows that see nothing come last."""
    return x if moved is None else jnp.roll(x, -moved if up else moved, _ROWS)


def _where_hidden(moved, value, x):
    """Replace rows that see nothing by `value`."""
    return x if moved is None else jnp.where(jnp.arange(x.shape[_ROWS]) < moved, value, x)


def _tokens_first(kv: Float[Array, "2 B K S d"]) -> Float[Array, "2 B S K d"]:
    return kv.swapaxes(2, 3)
