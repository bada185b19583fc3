"""Ring attention (section 3 of the paper): exact attention over a sequence sharded along a ring of devices.

With n ranks, rank r computes the attention of its queries to all keys while shards of keys and values travel around the
ring, r -> r+1. At step t rank r holds the keys of rank r-t (mod n).

    forward    the rank's own block first, then steps 1 .. n-1; every hop starts before the block that hides it.
               n-1 hops of [k, v] in the input dtype.
    backward   steps 1 .. n-1, then the rank's own block. The gradients of a shard start on the first rank that the
               shard visits, follow the shard one hop behind, and return while each rank computes its own block.
               n-1 hops of [k, v], n-1 of float32 [dk, dv].

With p = exp(s - m) / l for a row's maximum m and denominator l, and delta = rowsum(o * do) - dlse, the gradients are
(FlashAttention, appendix B.2)

    dv = p^T do      ds = p * (do v^T - delta)      dq = scale ds k      dk = scale ds^T q

The residuals are q, k, v, o, m, l (and segment ids and bias), nothing else.

With `ulysses` = u, each u neighbours are one rank of a ring of n/u: they exchange heads before and after
(`head_exchange.py`). The residual o is that of a device's own tokens, so a remat policy that saves it saves its
exchange.
"""

from functools import partial
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from ringformer.ops import argument_checks, online_softmax
from ringformer.ops.argument_checks import AnyArray, SegmentIds, Segments
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.head_exchange import HeadExchange
from ringformer.ops.kernels.block_kernels import Kernel, check_head_size, check_kernel, check_masks, without_padding
from ringformer.ops.layouts import Layout
from ringformer.ops.ring_hops import Ring
from ringformer.ops.varying_axes import vary, vary_like, varying_axes

SAVED_OUTPUT, SAVED_SOFTMAX = "attention_output", "attention_softmax"
"""`checkpoint_name`s of o and of [m, l]; a remat policy that saves both avoids a second forward ring."""

LOOP = "ring"
"""Name scope of the loops over hops, by which readers of the compiled program recognise them."""

Output = Float[Array, "B T H d"]
"""Attention of queries, in their dtype."""

LogSumExp = Float32[Array, "B H T"]
"""Log-sum-exp of the logits of each row."""


class Options(TypedDict, total=False):
    """Keywords that do not affect the type of the result."""

    layout: Layout
    causal: bool
    segment_ids: SegmentIds
    segments: Segments
    bias: Float[AnyArray, "B S"] | None
    scale: float | None
    q_chunk: int | None
    k_chunk: int | None
    kernel: Kernel
    ulysses: int


@overload
def ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    axis_name: str | None,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Output, LogSumExp]: ...


@overload
def ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    axis_name: str | None,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Output: ...


@overload
def ring_attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, axis_name: str | None, return_lse: bool, **options: Unpack[Options]
) -> Output | tuple[Output, LogSumExp]: ...


def ring_attention(
    q: Float[AnyArray, "B T H d"],
    k: Float[AnyArray, "B S K d"],
    v: Float[AnyArray, "B S K d"],
    *,
    axis_name: str | None,
    layout: Layout = "contiguous",
    causal: bool = True,
    segment_ids: SegmentIds = None,
    segments: Segments = "any",
    bias: Float[AnyArray, "B S"] | None = None,
    scale: float | None = None,
    q_chunk: int | None = None,
    k_chunk: int | None = None,
    kernel: Kernel = "xla",
    ulysses: int = 1,
    return_lse: bool = False,
) -> Output | tuple[Output, LogSumExp]:
    """Compute exact attention of this device's queries to the keys of the whole ring (paper, section 3, algorithm 1).

    Call it inside `shard_map`, with the arrays of one device. Memory is linear in T: only the logits of one pair of
    chunks exist at a time. Differentiable in q, k, v and bias, also through lse, by reverse mode, and by forward mode
    over reverse. The softmax and sums of gradients are float32.

    Args:
      q: this rank's queries; float64 is computed to float32 accuracy.
      k, v: this rank's keys and values, of q's dtype; H a multiple of K (GQA, MQA), S = T if causal.
      axis_name: the mesh axis of the ring, of any size. None: one device with all keys.
      layout: the tokens that each rank holds (`ringformer.ops.layouts`). zigzag balances causal work and needs even T.
      causal: a query sees no later token. If False, the layout does not matter.
      segment_ids: one array, or a pair for queries and keys: tokens see only their own segment. Blocks and chunks
        without a common segment cost nothing if ids ascend along the sequence. Numpy ids of 64 bits stay exact, unless
        they are arguments of an enclosing jit, which JAX cuts to 32 bits.
      segments: "ascending" promises that ids never decrease along the sequence (in natural order; padding comes last or
        has ids of its own), as those of `ringformer.data` do. Nothing checks it; wrong ids give wrong attention.
      bias: added to the scaled logits of this rank's keys (the paper's attn_bias, Figure 4).
      scale: factor of the logits, default d**-0.5.
      q_chunk, k_chunk: tokens per chunk (default: 16 chunks per shard, 128 to 1024 tokens); they need not divide T.
      kernel: code that computes a block: "xla"; "pallas" on TPU, for bfloat16 and float32; "cudnn" on GPU, for bfloat16
        and float16, with head sizes that are multiples of 8, without bias or chunks, and with segment ids only if they
        ascend, under a causal mask and in a layout other than striped.
      ulysses: u neighbours on the axis exchange heads, and are one rank of a ring of n/u (`head_exchange.py`); it
        divides n and H, and K need not. Token order is that of a ring of n/u (`layouts.positions`).
      return_lse: also return the log-sum-exp of each row.

    Returns:
      o in q's dtype, or (o, lse). A query that sees no key gets o = 0, lse = -inf and no gradient.

    Raises:
      ValueError: shapes, dtypes, layout or chunks are inconsistent; the message names both sides.
    """
    argument_checks.check(q, k, v, layout, causal, segment_ids, segments, bias, q_chunk, k_chunk)
    q_ids, k_ids = argument_checks.as_segment_ids(segment_ids)
    check_kernel(kernel, q.dtype)
    check_head_size(kernel, q.shape[-1])
    in_order = "contiguous" if axis_name is None else layout
    check_masks(kernel, None if q_ids is None else segments, in_order, causal, bias is not None)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    exchange = HeadExchange.of(axis_name, ulysses, q.shape[2], k.shape[2])
    ring = Ring(axis_name, layout, causal, scale, q_chunk, k_chunk, kernel, exchange, return_lse)
    arrays = jax.tree.map(jnp.asarray, (q, k, v, argument_checks.as_bias(bias), q_ids, k_ids))
    # A custom_vjp must return cotangents that vary as its inputs do. So the cast to a common type stays outside of it:
    # the cast's transpose sums the gradient of, say, keys that were replicated over a tensor parallel axis.
    arrays = vary(arrays, varying_axes(arrays) | ({axis_name} if axis_name else set()))
    o, lse = _ring_attention(ring, *reverse_mode_only(arrays, "ring_attention"))
    return (o, lse) if return_lse else o


# --- one device's share of the ring -------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(ring: Ring, q, k, v, bias, q_ids, k_ids):
    return _forward(ring, q, k, v, bias, q_ids, k_ids)[0]


def _forward(ring: Ring, q, k, v, bias, q_ids, k_ids):
    exchange = ring.exchange
    q, k, v = (exchange.to_heads(x) for x in (q, exchange.repeated(k), exchange.repeated(v)))
    bias, q_ids, k_ids = (exchange.gathered(x) for x in (bias, q_ids, k_ids))
    residuals = q, k, v, bias, q_ids, k_ids
    ring, (q, k, v, bias, q_ids, k_ids) = ring.whole_chunks(*residuals)
    n, (T, S) = ring.size, (q.shape[1], k.shape[1])
    rank, *tied = ring.rank_bound_to(q, q_ids, k_ids)
    queries, keys = _grouped(tied[0], k.shape[2], tied[1]), _stacked(k, v, bias, tied[2])
    state = online_softmax.init(queries.q.shape[:-1], queries.q.shape[-1])
    state = vary_like(state, queries, keys)

    def step(t, carry, send):
        state, keys = carry
        arriving = ring.shift(keys) if send else None
        work_list = ring.work_list(T, S, earlier=None if t is None else rank >= t)
        state = ring.blocks.forward(state, queries, keys, work_list, ring.scale)
        # When the next hop begins, these keys are no longer read: two buffers suffice, and none is copied. And nobody
        # waits for the next segment ids before this block has hidden their hop.
        return lax.optimization_barrier((state, arriving)) if ring.blocks.unroll else (state, arriving)

    carry = step(None, (state, keys), send=n > 1)
    if n > 1:
        with jax.named_scope(LOOP):
            carry = lax.fori_loop(1, n - 1, partial(step, send=True), carry, unroll=ring.blocks.unroll)
        carry = step(n - 1, carry, send=False)
    state = carry[0]
    length = residuals[0].shape[1]
    o = rearrange(online_softmax.output(state), "b k g t d -> b t (k g) d").astype(q.dtype)
    o = exchange.to_tokens(without_padding(o, ring.parts, length, 1))
    softmax = rearrange(jnp.stack([state.m, state.l]), "two b k g t -> two b (k g) t")
    softmax = without_padding(softmax, ring.parts, length, 3)
    o, softmax = checkpoint_name(o, SAVED_OUTPUT), checkpoint_name(softmax, SAVED_SOFTMAX)
    lse = online_softmax.log_sum_exp(softmax[0] * ring.blocks.log_unit, softmax[1])
    return (o, exchange.to_tokens(lse, tokens=2, heads=1)), (*residuals, o, softmax)


def _backward(ring: Ring, residuals, cotangents):
    *arrays, o, softmax = residuals
    do, dlse = cotangents
    exchange, lengths = ring.exchange, [x.shape[1] for x in arrays[:2]]
    ring, (q, k, v, bias, q_ids, k_ids) = ring.whole_chunks(*arrays)
    n, (T, S, K) = ring.size, (q.shape[1], k.shape[1], k.shape[2])
    rank, *tied = ring.rank_bound_to(q, q_ids, k_ids)
    queries, own = _grouped(tied[0], K, tied[1]), _stacked(k, v, bias, tied[2])
    delta = jnp.einsum("bthd,bthd->bht", o, do, preferred_element_type=jnp.float32) - dlse
    delta = exchange.to_heads(delta, tokens=2, heads=1)
    numbers = ring.whole_queries(jnp.stack([*online_softmax.shift_and_weight(*softmax), delta]), axis=3)
    do, o = (_grouped(ring.whole_queries(exchange.to_heads(x)), K, None).q for x in (do, o))
    if ring.returns_lse:
        dlse = ring.whole_queries(exchange.to_heads(dlse, tokens=2, heads=1), axis=2)
    dlse = rearrange(dlse, "b (k g) t -> b k g t", k=K) if ring.returns_lse else None
    rows = ring.blocks.prepare(Cotangents(do, rearrange(numbers, "three b (k g) t -> three b k g t", k=K), o, dlse))

    halves = ring.head_halves(K) if n > 1 else None

    def step(t, carry, send):
        """Run block t, and meanwhile fetch the gradients of the present keys; these gradients travel one hop behind the
        keys."""
        dq, dkeys, keys = carry
        arriving = ring.shift(keys) if send else None
        block = queries, keys, rows, ring.work_list(T, S, earlier=None if t is None else rank >= t), ring.scale
        if halves is None:
            behind = ring.shift(dkeys)
            dq, share = ring.blocks.backward(dq, *block)
            return dq, share if behind is None else jax.tree.map(jnp.add, behind, share), arriving
        # The kernel adds to gradients that must be here before it starts. So those of one half of the heads travel
        # while it computes the other half.
        first, second = (None, None) if dkeys is None else dkeys
        second = ring.shift(second)
        dq, first = ring.blocks.backward(dq, *block, first, halves[0])
        first = first if t is None else ring.shift(first)
        dq, second = ring.blocks.backward(dq, *block, second, halves[1])
        dq, arriving = lax.optimization_barrier((dq, arriving))  # as in the forward
        return dq, (first, second), arriving

    dq = vary_like(jnp.zeros(queries.q.shape, jnp.float32), queries, own)
    carry = dq, None, own
    if n > 1:
        carry = step(1, (dq, None, ring.shift(own)), send=n > 2)
    if n > 2:
        with jax.named_scope(LOOP):
            carry = lax.fori_loop(2, n - 1, partial(step, send=True), carry, unroll=ring.blocks.unroll)
        carry = step(n - 1, carry, send=False)
    # Stack the rank's own keys again: keeping them through the loop would take the memory of k and v twice.
    dq, dkeys, k_now, v_now = lax.optimization_barrier((*carry[:2], k, v))
    dq, dkeys, _ = step(None, (dq, dkeys, _stacked(k_now, v_now, bias, tied[2])), send=False)

    if halves is not None:
        first, second = dkeys
        dbias = None if bias is None else first.bias + second.bias
        dkeys = KeyGradients(jnp.concatenate([first.kv, second.kv], axis=2), dbias)
    dq = rearrange(dq, "b k g t d -> b t (k g) d")
    dq = exchange.to_tokens(without_padding(dq, ring.parts, lengths[0], 1).astype(q.dtype))
    dk, dv = (without_padding(rearrange(x, "b k s d -> b s k d"), ring.parts, lengths[1], 1) for x in dkeys.kv)
    dk, dv = (exchange.key_gradients(x, k.dtype) for x in (dk, dv))
    dbias = dkeys.bias if bias is None else exchange.summed(without_padding(dkeys.bias, ring.parts, lengths[1], 1))
    return dq, dk, dv, dbias, None, None


_ring_attention.defvjp(_forward, _backward)


def _grouped(q, K, segment_ids) -> Queries:
    return Queries(rearrange(q, "b t (k g) d -> b k g t d", k=K), segment_ids)


def _stacked(k, v, bias, segment_ids) -> Keys:
    return Keys(rearrange(jnp.stack([k, v]), "two b s k d -> two b k s d"), segment_ids, bias)
