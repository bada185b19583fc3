"""Ring attention as a differentiable function of one device's arrays.

Around the passes of the ring, heads are exchanged, chunks are filled up, keys are divided into streams, and the results
of the streams are joined. With p = exp(s - m) / l for a row's maximum m and denominator l, and
delta = rowsum(o * do) - dlse, the gradients are (FlashAttention, appendix B.2)

    dv = p^T do      ds = p * (do v^T - delta)      dq = scale ds k      dk = scale ds^T q

The residuals are q, k, v, o, m, l (and segment ids, bias and sinks), nothing else. With head exchange, the residual o
is that of a device's own tokens, so a remat policy that saves it saves its exchange.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from ringformer.ops import online_softmax
from ringformer.ops.attention import Attention, Shard
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys
from ringformer.ops.gathered_passes import gathered_backward, gathered_forward
from ringformer.ops.head_exchange import HeadExchange
from ringformer.ops.kernels.block_kernels import without_padding
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.rank import Rank
from ringformer.ops.ring import Ring
from ringformer.ops.ring_passes import ring_backward, ring_forward
from ringformer.ops.streams import joined_key_gradients, joined_query_gradients, joined_states
from ringformer.ops.varying_axes import vary_like
from ringformer.ops.window_passes import window_backward, window_forward

SAVED_OUTPUT = "attention_output"
SAVED_SOFTMAX = "attention_softmax"
"""`checkpoint_name`s of o and of [m, l]; a remat policy that saves both avoids a second forward ring."""


class Residuals(NamedTuple):
    """Arrays that the backward reads."""

    shard: Shard
    sinks: Float[Array, " H"] | None
    o: Float[Array, "B T H d"]
    softmax: Float32[Array, "2 B H T"]
    """m and l of each row."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_on_ring(attention: Attention, q, k, v, bias, q_ids, k_ids, sinks):
    """Return o [B, T, H, d] and lse [B, H, T] of this device's queries; arguments as in `ring_attention`, but `sinks`
    are those of the heads that the device has during attention."""
    return _forward(attention, q, k, v, bias, q_ids, k_ids, sinks)[0]


def _forward(attention: Attention, q, k, v, bias, q_ids, k_ids, sinks):
    ring = attention.ring
    log_unit = attention.blocks.code.log_unit
    shard = _with_heads_exchanged(ring.exchange, Shard(q, k, v, bias, q_ids, k_ids))
    rank, filled = _enter(attention, shard)
    keys = _keys_of_streams(rank, filled)
    states = vary_like(_initial_states(rank, filled.key_heads, sinks), rank.queries, keys)
    states = _attended(rank, states, keys)

    state = joined_states(rank.streams, states, log_unit)
    length = shard.length
    o = rearrange(online_softmax.output(state), "b k g t d -> b t (k g) d").astype(q.dtype)
    o = ring.exchange.to_tokens(without_padding(o, ring.parts, length, 1))
    softmax = rearrange(jnp.stack([state.m, state.l]), "two b k g t -> two b (k g) t")
    softmax = without_padding(softmax, ring.parts, length, 3)
    o = checkpoint_name(o, SAVED_OUTPUT)
    softmax = checkpoint_name(softmax, SAVED_SOFTMAX)
    lse = online_softmax.log_sum_exp(softmax[0] * log_unit, softmax[1])
    lse = ring.exchange.to_tokens(lse, tokens=2, heads=1)
    return (o, lse), Residuals(shard, sinks, o, softmax)


def _backward(attention: Attention, residuals: Residuals, cotangents):
    do, dlse = cotangents
    ring = attention.ring
    shard = residuals.shard
    numbers = _row_numbers(ring.exchange, residuals, do, dlse)
    rank, filled = _enter(attention, shard, backward=True)
    rows = _rows_of_streams(rank, filled.key_heads, residuals.o, numbers, do, dlse)
    dqs = []
    for queries, keys in zip(rank.queries, _keys_of_streams(rank, filled), strict=True):
        dqs.append(vary_like(jnp.zeros(queries.q.shape, jnp.float32), queries, keys))
    dqs, gradients = _differentiated(rank, filled, dqs, rows)

    dq = rearrange(joined_query_gradients(rank.streams, dqs), "b k g t d -> b t (k g) d")
    dq = without_padding(dq, ring.parts, shard.length, 1).astype(shard.q.dtype)
    of_keys = joined_key_gradients(rank.streams, gradients, ring.parts)
    dk, dv = [_key_gradients(ring, shard, x) for x in of_keys.kv]
    dbias = of_keys.bias
    if dbias is not None:
        dbias = ring.exchange.summed(without_padding(dbias, ring.parts, shard.keys, 1))
    dsinks = None if residuals.sinks is None else _sink_gradients(attention, residuals.sinks, numbers)
    return ring.exchange.to_tokens(dq), dk, dv, dbias, None, None, dsinks


attention_on_ring.defvjp(_forward, _backward)


# --- into the ring --------------------------------------------------------------------------------------------------


def _with_heads_exchanged(exchange: HeadExchange, shard: Shard) -> Shard:
    """Return the arrays that a device has during attention."""
    return Shard(
        exchange.to_heads(shard.q),
        exchange.to_heads(exchange.repeated(shard.k)),
        exchange.to_heads(exchange.repeated(shard.v)),
        exchange.gathered(shard.bias),
        exchange.gathered(shard.q_ids),
        exchange.gathered(shard.k_ids),
    )


def _enter(attention: Attention, shard: Shard, backward: bool = False) -> tuple[Rank, Shard]:
    """Return the rank with its queries, and its shard in whole chunks."""
    attention, filled = attention.in_whole_chunks(shard)
    index, q, q_ids, k_ids = attention.ring.rank_bound_to(filled.q, filled.q_ids, filled.k_ids)
    streams = attention.streams(filled.keys, filled.key_heads, backward)
    queries = [stream.queries(q, filled.key_heads, q_ids) for stream in streams]
    rank = Rank(attention, index, queries, streams, filled.keys, backward)
    return rank, filled._replace(q=q, q_ids=q_ids, k_ids=k_ids)


def _keys_of_streams(rank: Rank, shard: Shard) -> list[Keys]:
    """Return the keys that travel in each stream."""
    parts = rank.ring.parts
    return [stream.keys(shard.k, shard.v, shard.bias, shard.k_ids, parts) for stream in rank.streams]


def _initial_states(rank: Rank, key_heads: int, sinks: Float[Array, " H"] | None) -> list[Softmax]:
    """Return the running softmax of each stream before any key: empty, or that of the sinks."""
    of_log = None if sinks is None else sinks / rank.blocks.code.log_unit
    states = []
    for queries, stream in zip(rank.queries, rank.streams, strict=True):
        shape = queries.q.shape
        states.append(online_softmax.init(shape[:-1], shape[-1], stream.sinks(of_log, key_heads)))
    return states


# --- the passes -----------------------------------------------------------------------------------------------------


def _attended(rank: Rank, states: list[Softmax], keys: list[Keys]) -> list[Softmax]:
    """Add the keys of all ranks to the running softmax of each stream."""
    if rank.attention.mask.window is not None:
        return [window_forward(rank.attention, rank.index, states[0], rank.queries[0], keys[0])]
    if rank.ring.gathers:
        return gathered_forward(rank, states, keys)
    return ring_forward(rank, states, keys)


def _differentiated(
    rank: Rank, shard: Shard, dqs: list[jax.Array], rows: list[Cotangents]
) -> tuple[list[jax.Array], list[KeyGradients]]:
    """Add to dq of each stream, and return the gradients of the rank's own keys, summed over all ranks."""

    def own_keys(k: jax.Array, v: jax.Array) -> list[Keys]:
        return _keys_of_streams(rank, shard._replace(k=k, v=v))

    k_and_v = shard.k, shard.v
    if rank.attention.mask.window is not None:
        (keys,) = own_keys(*k_and_v)
        dq, gradients = window_backward(rank.attention, rank.index, dqs[0], rank.queries[0], keys, rows[0])
        return [dq], [gradients]
    if rank.ring.gathers:
        return gathered_backward(rank, dqs, own_keys, k_and_v, rows)
    return ring_backward(rank, dqs, own_keys, k_and_v, rows)


# --- the numbers of the rows, and out of the ring -------------------------------------------------------------------


class RowNumbers(NamedTuple):
    """Numbers of each row of the heads that the device has during attention."""

    m: Float32[Array, "B H T"]
    weight: Float32[Array, "B H T"]
    """1 / l."""
    delta: Float32[Array, "B H T"]


def _row_numbers(exchange: HeadExchange, residuals: Residuals, do: jax.Array, dlse: jax.Array) -> RowNumbers:
    delta = jnp.einsum("bthd,bthd->bht", residuals.o, do, preferred_element_type=jnp.float32) - dlse
    m, weight = online_softmax.shift_and_weight(*residuals.softmax)
    return RowNumbers(m, weight, exchange.to_heads(delta, tokens=2, heads=1))


def _rows_of_streams(
    rank: Rank, key_heads: int, o: jax.Array, numbers: RowNumbers, do: jax.Array, dlse: jax.Array
) -> list[Cotangents]:
    """Return what the blocks of each stream read of its rows."""
    attention = rank.attention
    exchange = rank.ring.exchange
    stacked = attention.whole_queries(jnp.stack(numbers), axis=3)
    do = attention.whole_queries(exchange.to_heads(do))
    o = attention.whole_queries(exchange.to_heads(o))
    of_lse = None
    if attention.returns_lse:
        of_lse = attention.whole_queries(exchange.to_heads(dlse, tokens=2, heads=1), axis=2)
    return [rank.blocks.code.prepare(stream.cotangents(do, o, stacked, of_lse, key_heads)) for stream in rank.streams]


def _sink_gradients(attention: Attention, sinks: Float[Array, " H"], numbers: RowNumbers) -> Float32[Array, " H"]:
    p = (
        jnp.exp(sinks[:, None] - numbers.m * attention.blocks.code.log_unit) * numbers.weight
    )  # its value is 0, so its dp is 0
    return -(p * numbers.delta).sum(axis=(0, 2))


def _key_gradients(ring: Ring, shard: Shard, x: Float32[Array, "B K filled d"]) -> Float[Array, "B S heads d"]:
    """Return dk or dv of the device's own tokens and of all key heads."""
    of_rank = without_padding(rearrange(x, "b k s d -> b s k d"), ring.parts, shard.keys, 1)
    return ring.exchange.key_gradients(of_rank, shard.k.dtype)
