"""The forward and the backward pass of ring attention on one device.

    forward    the rank's own block first, then steps 1 .. n-1; every hop starts before the block that hides it.
               n-1 hops of [k, v] in the input dtype.
    backward   steps 1 .. n-1, then the rank's own block. The gradients of a shard start on the first rank that the
               shard visits, follow the shard one hop behind, and return while each rank computes its own block.
               n-1 hops of [k, v], n-1 of float32 [dk, dv].
    gathered   one block of all other ranks' keys instead of the steps, for each half of the heads; a reduce-scatter
               sums its float32 [dk, dv] under the other half, or under the rank's own block.

With p = exp(s - m) / l for a row's maximum m and denominator l, and delta = rowsum(o * do) - dlse, the gradients are
(FlashAttention, appendix B.2)

    dv = p^T do      ds = p * (do v^T - delta)      dq = scale ds k      dk = scale ds^T q

The residuals are q, k, v, o, m, l (and segment ids and bias), nothing else. With head exchange, the residual o is that
of a device's own tokens, so a remat policy that saves it saves its exchange.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ringformer.ops import online_softmax
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.kernels.block_kernels import without_padding
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.ring_hops import Ring
from ringformer.ops.streams import Streams, joined_key_gradients, joined_query_gradients, joined_states, with_shared_ids
from ringformer.ops.varying_axes import vary_like
from ringformer.ops.window_passes import window_backward, window_forward

SAVED_OUTPUT, SAVED_SOFTMAX = "attention_output", "attention_softmax"
"""`checkpoint_name`s of o and of [m, l]; a remat policy that saves both avoids a second forward ring."""

LOOP = "ring"
"""Name scope of the loops over hops, by which readers of the compiled program recognise them."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_on_ring(ring: Ring, q, k, v, bias, q_ids, k_ids, sinks):
    """Return o [B, T, H, d] and lse [B, H, T] of this device's queries; arguments as in `ring_attention`, but `sinks`
    are those of the heads that the device has during attention."""
    return _forward(ring, q, k, v, bias, q_ids, k_ids, sinks)[0]


def _forward(ring: Ring, q, k, v, bias, q_ids, k_ids, sinks):
    exchange = ring.exchange
    q, k, v = (exchange.to_heads(x) for x in (q, exchange.repeated(k), exchange.repeated(v)))
    bias, q_ids, k_ids = (exchange.gathered(x) for x in (bias, q_ids, k_ids))
    residuals = q, k, v, bias, q_ids, k_ids
    ring, (q, k, v, bias, q_ids, k_ids) = ring.whole_chunks(*residuals)
    S, K = k.shape[1:3]
    rank, *tied = ring.rank_bound_to(q, q_ids, k_ids)
    streams = ring.streams(S, K)
    queries_of = [stream.queries(tied[0], K, tied[1]) for stream in streams]
    keys_of = [stream.keys(k, v, bias, tied[2], ring.parts) for stream in streams]
    of_log = None if sinks is None else sinks / ring.blocks.log_unit
    states = [
        online_softmax.init(x.q.shape[:-1], x.q.shape[-1], stream.sinks(of_log, K))
        for x, stream in zip(queries_of, streams, strict=True)
    ]
    states = vary_like(states, queries_of, keys_of)
    if ring.window is None:
        states = _ring_forward(ring, rank, S, streams, states, queries_of, keys_of)
    else:
        states = [window_forward(ring, rank, states[0], queries_of[0], keys_of[0])]
    state = joined_states(streams, states, ring.blocks.log_unit)
    length = residuals[0].shape[1]
    o = rearrange(online_softmax.output(state), "b k g t d -> b t (k g) d").astype(q.dtype)
    o = exchange.to_tokens(without_padding(o, ring.parts, length, 1))
    softmax = rearrange(jnp.stack([state.m, state.l]), "two b k g t -> two b (k g) t")
    softmax = without_padding(softmax, ring.parts, length, 3)
    o, softmax = checkpoint_name(o, SAVED_OUTPUT), checkpoint_name(softmax, SAVED_SOFTMAX)
    lse = online_softmax.log_sum_exp(softmax[0] * ring.blocks.log_unit, softmax[1])
    return (o, exchange.to_tokens(lse, tokens=2, heads=1)), (*residuals, sinks, o, softmax)


def _ring_forward(
    ring: Ring,
    rank: jax.Array,
    S: int,
    streams: Streams,
    states: list[Softmax],
    queries_of: list[Queries],
    keys_of: list[Keys],
) -> list[Softmax]:
    """Add the keys of all ranks, S on each, to the running softmax of each stream."""
    n, T = ring.size, queries_of[0].q.shape[3]

    def step(t, carry, send):
        states, keys = carry
        arriving = [ring.shift(*x) if send else None for x in zip(keys, streams, strict=True)]
        states = [
            ring.forward(state, queries, visiting, ring.work_list(T, S, ring.is_earlier(rank, t, stream), stream))
            for state, queries, visiting, stream in zip(states, queries_of, keys, streams, strict=True)
        ]
        # When the next hop begins, these keys are no longer read: two buffers suffice, and none is copied. And nobody
        # waits for the next segment ids before this block has hidden their hop.
        return lax.optimization_barrier((states, arriving)) if ring.blocks.unroll else (states, arriving)

    carry = step(None, (states, keys_of), send=ring.hops > 0)
    if ring.hops > 0:
        with jax.named_scope(LOOP):
            carry = lax.fori_loop(1, n - 1, partial(step, send=True), carry, unroll=ring.blocks.unroll)
        carry = step(n - 1, carry, send=False)
    states, _ = carry
    if n > 1 and ring.hops == 0:
        others = [ring.gathered(x) for x in with_shared_ids(streams, keys_of)]
        states = [ring.forward(*x, ring.others(T, S, rank)) for x in zip(states, queries_of, others, strict=True)]
    return states


def _backward(ring: Ring, residuals, cotangents):
    *arrays, sinks, o, softmax = residuals
    do, dlse = cotangents
    exchange, lengths = ring.exchange, [x.shape[1] for x in arrays[:2]]
    ring, (q, k, v, bias, q_ids, k_ids) = ring.whole_chunks(*arrays)
    S, K = k.shape[1:3]
    rank, *tied = ring.rank_bound_to(q, q_ids, k_ids)
    delta = jnp.einsum("bthd,bthd->bht", o, do, preferred_element_type=jnp.float32) - dlse
    delta = exchange.to_heads(delta, tokens=2, heads=1)
    m, weight = online_softmax.shift_and_weight(*softmax)
    dsinks = None
    if sinks is not None:
        p = jnp.exp(sinks[:, None] - m * ring.blocks.log_unit) * weight  # a sink's value is 0, so its dp is 0
        dsinks = -(p * delta).sum(axis=(0, 2))
    numbers = ring.whole_queries(jnp.stack([m, weight, delta]), axis=3)
    do, o = (ring.whole_queries(exchange.to_heads(x)) for x in (do, o))
    dlse = ring.whole_queries(exchange.to_heads(dlse, tokens=2, heads=1), axis=2) if ring.returns_lse else None

    streams = ring.streams(S, K, backward=True)
    queries_of = [stream.queries(tied[0], K, tied[1]) for stream in streams]
    rows_of = [ring.blocks.prepare(stream.cotangents(do, o, numbers, dlse, K)) for stream in streams]

    def own_keys(k, v):
        return [stream.keys(k, v, bias, tied[2], ring.parts) for stream in streams]

    dqs = [jnp.zeros(x.q.shape, jnp.float32) for x in queries_of]
    dqs = [vary_like(*x) for x in zip(dqs, queries_of, own_keys(k, v), strict=True)]
    if ring.window is None:
        dqs, gradients = _ring_backward(ring, rank, streams, dqs, queries_of, rows_of, own_keys, (k, v))
    else:
        dq, share = window_backward(ring, rank, dqs[0], queries_of[0], own_keys(k, v)[0], rows_of[0])
        dqs, gradients = [dq], [share]
    dq = rearrange(joined_query_gradients(streams, dqs), "b k g t d -> b t (k g) d")
    dq = exchange.to_tokens(without_padding(dq, ring.parts, lengths[0], 1).astype(q.dtype))
    dkv, dbias = joined_key_gradients(streams, gradients, ring.parts)
    dk, dv = (without_padding(rearrange(x, "b k s d -> b s k d"), ring.parts, lengths[1], 1) for x in dkv)
    dk, dv = (exchange.key_gradients(x, k.dtype) for x in (dk, dv))
    if dbias is not None:
        dbias = exchange.summed(without_padding(dbias, ring.parts, lengths[1], 1))
    return dq, dk, dv, dbias, None, None, dsinks


def _ring_backward(
    ring: Ring,
    rank: jax.Array,
    streams: Streams,
    dqs: list[jax.Array],
    queries_of: list[Queries],
    rows_of: list[Cotangents],
    own_keys: Callable[..., list[Keys]],
    k_and_v: tuple[jax.Array, jax.Array],
) -> tuple[list[jax.Array], list[KeyGradients]]:
    """Add to dq of each stream, and return the gradients of the rank's own keys, summed over all ranks.

    Args:
      own_keys: a function that makes the keys of each stream from k and v.
    """
    n, T, S, own = ring.size, queries_of[0].q.shape[3], k_and_v[0].shape[1], own_keys(*k_and_v)

    # A kernel that adds to gradients needs them before it starts. So those of one stream travel while the kernel
    # computes the other stream: the first stream's after its block, the last stream's before its block.
    in_place = ring.blocks.adds_gradients and len(streams) == 2

    def step(t, carry, send):
        """Run block t, and meanwhile fetch the next keys and the gradients of the present keys, which travel one hop
        behind the keys."""
        dqs, dkeys, keys = carry
        keys = with_shared_ids(streams, keys)
        arriving = [ring.shift(*x) if send else None for x in zip(keys, streams, strict=True)]
        for i, stream in enumerate(streams):
            work_list = ring.work_list(T, S, ring.is_earlier(rank, t, stream), stream)
            block = queries_of[i], keys[i], rows_of[i], work_list
            behind = dkeys[i] if ring.hops == 0 or (in_place and i == 0) else ring.shift(dkeys[i], stream)
            if in_place:
                dqs[i], dkeys[i] = ring.backward(dqs[i], *block, behind)
                dkeys[i] = ring.shift(dkeys[i], stream) if i == 0 and t is not None else dkeys[i]
            else:
                dqs[i], share = ring.backward(dqs[i], *block)
                dkeys[i] = share if behind is None else jax.tree.map(jnp.add, behind, share)
        if in_place:
            dqs, arriving = lax.optimization_barrier((dqs, arriving))  # as in the forward
        return dqs, dkeys, arriving

    carry: Any = dqs, [None] * len(streams), []
    if ring.hops > 0:
        carry = step(1, (*carry[:2], [ring.shift(*x) for x in zip(own, streams, strict=True)]), send=n > 2)
    if ring.hops > 1:
        with jax.named_scope(LOOP):
            carry = lax.fori_loop(2, n - 1, partial(step, send=True), carry, unroll=ring.blocks.unroll)
        carry = step(n - 1, carry, send=False)
    if n > 1 and ring.hops == 0:
        # The gradients of one half of the heads are summed under the other half, and those under the own block.
        blocks = zip(dqs, queries_of, [ring.gathered(x) for x in with_shared_ids(streams, own)], rows_of, strict=True)
        pairs = [ring.backward(*x, ring.others(T, S, rank)) for x in blocks]
        carry = [dq for dq, _ in pairs], [ring.scattered(of_others) for _, of_others in pairs], []
    # Stack the rank's own keys again: keeping them through the loop would take the memory of k and v twice.
    sums, k_and_v = lax.optimization_barrier((carry[:2], k_and_v))
    dqs, gradients, _ = step(None, (*sums, own_keys(*k_and_v)), send=False)
    return dqs, gradients


attention_on_ring.defvjp(_forward, _backward)
