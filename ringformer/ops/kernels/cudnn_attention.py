"""Attention of a block by cuDNN on GPUs, with the block contract of `ops/blockwise_attention.py`.

Each pair of whole parts of a shard is one call (`cudnn_calls.py`). A call sees one of four sets of keys: all of them,
those that a causal mask leaves once the queries are shifted by the offset, those within a window, or those of one
packed document (`cudnn_documents.py`). The indices of the parts may be traced, so that no call needs a branch around
it.

    forward    a call returns o and lse for only its keys: a softmax state with m = lse and l = 1, joined to the running
               state in float32.
    backward   given the FINAL o and lse of the row, each call returns its share of dq, dk, dv, rounded to the dtype of
               the inputs; the shares are added in float32.

cuDNN computes delta = rowsum(o * do) and supports no cotangent of lse. The gradients are linear in the two cotangents,
so a second call adds the share of dlse: with do v^T = dlse and o = 0, it computes ds = p * dlse.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from ringformer.ops import blockwise_attention, online_softmax
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.derivative_guards import without_derivatives
from ringformer.ops.kernels import cudnn_documents
from ringformer.ops.kernels.cudnn_shares import Rows, attend, gradients, under_offset, within_window
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.varying_axes import vary_like
from ringformer.ops.work_list import AxisChunks, ChunkPairs, WorkList, diagonal_work_list

SECOND = "ring_attention with kernel='cudnn'", "kernel='xla'"
"""Names for an error about second derivatives: the name of this kernel, which lacks them, and that of the
alternative."""

HEAD_SIZES = {8: 128, 9: 256}
"""Largest head size by the major version of a GPU's compute capability: Ampere, Hopper."""

_LARGEST = max(HEAD_SIZES.values())
_MULTIPLE = 8


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
    """Add every visible key of `keys` to the running softmax of every query. Segment ids must ascend along the
    sequence."""
    queries, keys = without_derivatives((queries, keys), *SECOND)
    if _is_own(queries, work_list):
        return _own_forward(state, queries, keys, scale)
    seeing = _seeing_queries(work_list)

    def call(state, pair, masked, exists=True):
        q, kv, view = _call(queries, keys, pair, masked, work_list, exists)
        rows = jax.tree.map(lambda x: _part(x, pair.q, seeing), state)
        rows = online_softmax.join(rows, attend(q, kv, view, scale))
        return jax.tree.map(lambda x, part: _put(x, part, pair.q, seeing), state, rows)

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
    rows = Rows.of(cotangents)
    if _is_own(queries, work_list):
        return _own_backward(dq, queries, keys, cotangents, rows, scale)
    seeing = _seeing_queries(work_list)

    def call(carry, pair, masked, exists=True):
        dq, dkv = carry
        q, kv, view = _call(queries, keys, pair, masked, work_list, exists)
        here = jax.tree.map(lambda x: _part(x, pair.q, seeing), rows)
        share, key_share = gradients(q, kv, here, view, scale)
        return (
            _put(dq, _part(dq, pair.q, seeing) + share, pair.q, seeing),
            _put(dkv, _part(dkv, pair.k, work_list.k_chunks) + key_share, pair.k, work_list.k_chunks),
        )

    dkv = vary_like(jnp.zeros(keys.kv.shape, jnp.float32), queries, keys, cotangents)
    dq, dkv = _for_each_call(call, (dq, dkv), work_list)
    return dq, KeyGradients(tuple(dkv), None)


def _for_each_call(call, carry, work_list: WorkList):
    """Run `call(carry, pair, masked)` for the pairs of a block.

    If the number of pairs depends on data, they run in a loop. Those of a window do not: only the first part of the
    sequence has no part before it, so it computes a call too, `call(carry, pair, masked, exists)`, whose results are
    hidden.
    """
    for (pairs, length), masked in ((work_list.unmasked, False), (work_list.masked, True)):
        most = len(pairs.q)

        def body(i, carry, pairs=pairs, masked=masked):
            return call(carry, ChunkPairs(*(x[i] for x in pairs)), masked)

        # The loop's name tells readers of the compiled program its bound.
        with jax.named_scope(f"at_most_{most}_trips"):
            if isinstance(length, int):
                for i in range(most):
                    carry = body(i, carry)
            elif work_list.window is not None:
                for i in range(most):
                    carry = call(carry, ChunkPairs(*(x[i] for x in pairs)), masked, i < length)
            else:
                carry = lax.fori_loop(0, length, body, carry)
    return carry


def _call(
    queries: Queries,
    keys: Keys,
    pair: ChunkPairs,
    masked: bool,
    work_list: WorkList,
    exists: bool | Bool[Array, ""],
):
    """Return the queries and keys of a pair of parts, and the view: the logits that the call sees."""
    q = _part(queries.q, pair.q, _seeing_queries(work_list))
    kv = _part(keys.kv, pair.k, work_list.k_chunks)
    if work_list.window is not None:
        return q, kv, within_window(int(pair.offset), kv.shape[3], work_list.window, exists)
    if queries.segment_ids is None or keys.segment_ids is None:
        return q, kv, under_offset(pair, masked)
    q_ids = _part(queries.segment_ids, pair.q, work_list.q_chunks, axis=1)
    k_ids = _part(keys.segment_ids, pair.k, work_list.k_chunks, axis=1)
    return q, kv, cudnn_documents.shared_document(q_ids, k_ids)


def _seeing_queries(work_list: WorkList) -> AxisChunks:
    """Return the queries of each part that a call computes. Within a window, these are the first ones, as many as there
    are keys: all for a part's own keys, and those that the window joins to the last keys of the part before."""
    if work_list.window is None:
        return work_list.q_chunks
    return work_list.q_chunks._replace(size=work_list.k_chunks.size)


def _part(x, i, chunks: AxisChunks, axis: int = 3):
    """Return part `i` of an axis of tokens; `i` may be traced."""
    if chunks.size == x.shape[axis]:
        return x
    return lax.dynamic_slice_in_dim(x, jnp.asarray(chunks.start)[i], chunks.size, axis)


def _put(x, part, i, chunks: AxisChunks):
    """Replace part `i` of `x`."""
    if chunks.size == x.shape[3]:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, jnp.asarray(chunks.start)[i], 3)


ONE_CALL = "at_most_1_trips"
"""Name scope of calls outside of loops, by which readers of the compiled program recognise attention."""


# --- a rank's own shard of packed documents -----------------------------------------------------------------------


def _is_own(queries: Queries, work_list: WorkList) -> bool:
    """Return True for the block of a rank's own documents, the only block of packed documents with a causal mask."""
    return queries.segment_ids is not None and len(work_list.masked.pairs.q) > 0


def _own_forward(state: Softmax, queries: Queries, keys: Keys, scale: float) -> Softmax:
    """Attend to a rank's own documents: XLA computes the chunk pairs on the diagonal, and cuDNN computes the rectangles
    below it."""
    T = queries.q.shape[3]
    diagonal = diagonal_work_list(T, cudnn_documents.count_pieces(T))
    state = blockwise_attention.block_forward(state, queries, keys, diagonal, scale)
    with jax.named_scope(ONE_CALL):
        for below in cudnn_documents.levels(T):
            seen = attend(*below.rectangles(queries, keys), scale)
            rows = online_softmax.join(jax.tree.map(below.later, state), seen)
            state = jax.tree.map(below.put_later, state, rows)
    return state


def _own_backward(dq, queries: Queries, keys: Keys, cotangents: Cotangents, rows: Rows, scale: float):
    """Add the gradients of a rank's own documents, as in `_own_forward`."""
    T = queries.q.shape[3]
    diagonal = diagonal_work_list(T, cudnn_documents.count_pieces(T))
    dq, dkeys = blockwise_attention.block_backward(dq, queries, keys, cotangents, diagonal, scale)
    dkv = jnp.stack(dkeys.kv)
    with jax.named_scope(ONE_CALL):
        for below in cudnn_documents.levels(T):
            q, kv, view = below.rectangles(queries, keys)
            share, key_share = gradients(q, kv, jax.tree.map(below.later, rows), view, scale)
            dq = below.put_later(dq, below.later(dq) + share)
            dkv = below.put_earlier(dkv, below.earlier(dkv) + key_share)
    return dq, KeyGradients(tuple(dkv), None)
