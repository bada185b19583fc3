"""Ring attention (section 3 of the paper): exact attention over a sequence sharded along a ring of devices.

With n ranks, rank r computes the attention of its queries to all keys, in one of three forms:

    one_way     shards of keys and values travel around the ring, r -> r+1. At step t rank r holds the keys of rank r-t
                (mod n).
    both_ways   half of the keys travels r -> r+1, and the other half r -> r-1 (`streams.py`). On a torus this uses the
                links of both directions.
    gathered    every rank gathers all keys at once, while it computes its own block.

`ring_passes.py` has the passes of a ring. With `ulysses` = u, each u neighbours are one rank of a ring of n/u: they
exchange heads before and after (`head_exchange.py`).
"""

from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ringformer.ops import argument_checks, layouts
from ringformer.ops.argument_checks import AnyArray, SegmentIds, Segments
from ringformer.ops.attention import Attention, Blocks, Mask
from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.head_exchange import HeadExchange
from ringformer.ops.kernels.block_kernels import (
    Kernel,
    check_both_ways,
    check_head_size,
    check_ids,
    check_kernel,
    check_logits,
    check_masks,
    window_fault,
)
from ringformer.ops.layouts import Layout
from ringformer.ops.ring import Ring, RingForm
from ringformer.ops.ring_vjp import attention_on_ring
from ringformer.ops.varying_axes import vary, varying_axes

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
    ring: RingForm
    window: int | None
    sinks: Float[AnyArray, " H"] | None
    logit_softcap: float | None
    attend_first: int


class DeviceOptions(Options, total=False):
    """Keywords of `ring_attention` that do not affect the type of the result."""

    rings: int


@overload
def ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    axis_name: str | None,
    return_lse: Literal[True],
    **options: Unpack[DeviceOptions],
) -> tuple[Output, LogSumExp]: ...


@overload
def ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    axis_name: str | None,
    return_lse: Literal[False] = False,
    **options: Unpack[DeviceOptions],
) -> Output: ...


@overload
def ring_attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, axis_name: str | None, return_lse: bool, **options: Unpack[DeviceOptions]
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
    ring: RingForm = "one_way",
    rings: int = 1,
    window: int | None = None,
    sinks: Float[AnyArray, " H"] | None = None,
    logit_softcap: float | None = None,
    attend_first: int = 0,
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
      layout: the tokens that each rank holds (`ringformer.ops.layouts`). zigzag balances causal work and needs even T
        or even u.
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
        and float16, with head sizes that are multiples of 8, without bias, chunks, `attend_first` or `logit_softcap`;
        with segment ids only if they ascend, under a causal mask and in a layout other than striped; and with a window
        only without segment ids, if it reaches no further than one part of the sequence (a shard, half in zigzag).
      ulysses: u neighbours on the axis exchange heads, and are one rank of a ring of n/u (`head_exchange.py`); it
        divides n and H, and K need not. Token order is that of a ring of n/u (`layouts.positions`). Under `jax.vmap`,
        and so in `jax.hessian`, u must be 1 or n: JAX batches no collectives of groups.
      ring: "one_way"; "both_ways": half of the keys travel in each direction, which on a torus uses twice the links;
        "gathered": every rank holds all keys at once, which suits short shards.
      rings: the ranks of the axis form so many equal rings of neighbours, each with a sequence of its own. So sequences
        that are shorter than the axis is long need fewer hops. Token order is that of `layouts.permutation`.
      window: a query sees at most so many keys, the last ones, its own included; needs a causal mask, and a layout
        other than striped. Keys then make only the hops that the window reaches (`window_passes.py`), whatever `ring`
        is.
      sinks: a logit per query head that takes weight in the softmax and has no value; float, differentiable.
      logit_softcap: bound c of the scaled logits: a logit s becomes c tanh(s / c), before bias and masks.
      attend_first: tokens at the beginning of the sequence that every later query sees, whatever the window.
      return_lse: also return the log-sum-exp of each row, sinks included.

    Returns:
      o in q's dtype, or (o, lse). A query that sees no key gets o = 0, lse = -inf (or its sink) and no gradient.

    Raises:
      ValueError: shapes, dtypes, layout or chunks are inconsistent; the message names both sides.
      NotImplementedError: a derivative that is not supported, or `jax.vmap` where groups of devices exchange heads.
    """
    causal, return_lse, ulysses, q_chunk, k_chunk = argument_checks.as_options(
        causal, return_lse, ulysses, q_chunk, k_chunk
    )
    argument_checks.check(q, k, v, layout, causal, segment_ids, segments, bias)
    q_ids, k_ids = argument_checks.as_segment_ids(segment_ids)
    check_kernel(kernel, q.dtype)
    check_head_size(kernel, q.shape[-1])
    in_order = "contiguous" if axis_name is None else layout
    check_masks(kernel, None if q_ids is None else segments, in_order, causal, bias is not None)
    if q_ids is not None:
        check_ids(kernel, q_ids.dtype)
    window, attend_first, logit_softcap = argument_checks.as_numbers(window, attend_first, logit_softcap)
    check_logits(kernel, attend_first, logit_softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    exchange = HeadExchange.of(axis_name, ulysses, q.shape[2], k.shape[2])
    if causal:
        layouts.check_layout(layout, q.shape[1] * ulysses, 1, ulysses)
    sinks = argument_checks.as_sinks(sinks, q.shape[2])
    if rings != 1 and axis_name is None:
        raise ValueError(f"rings={rings} cuts a mesh axis; axis_name is None")
    of_ranks = Ring(axis_name, layout if causal else "contiguous", ring, exchange, rings)
    argument_checks.check_window(window, attend_first, in_order, causal, segment_ids)
    blocks = Blocks(scale, kernel, q_chunk, k_chunk, logit_softcap)
    attention = Attention(of_ranks, blocks, Mask(causal, window, attend_first), return_lse)
    attention = attention.in_simplest_form(q.shape[1])
    if attention.ring.goes_both_ways:
        check_both_ways(kernel, k.shape[2] * exchange.copies // ulysses)
    if attention.mask.window is not None:
        has_other_parts = attention.ring.parts * attention.ring.size > 1
        part = q.shape[1] * ulysses // attention.ring.parts
        fault = window_fault(kernel, attention.mask.window, part if has_other_parts else None, q_ids is not None)
        if fault:
            raise ValueError(fault)
    arrays = jax.tree.map(jnp.asarray, (q, k, v, argument_checks.as_bias(bias), q_ids, k_ids, sinks))
    # A custom_vjp must return cotangents that vary as its inputs do. So the cast to a common type stays outside of it:
    # the cast's transpose sums the gradient of, say, keys that were replicated over a tensor parallel axis.
    arrays = vary(arrays, varying_axes(arrays) | ({axis_name} if axis_name else set()))
    arrays = exchange.unbatched(arrays)
    *arrays, of_heads = reverse_mode_only(arrays, "ring_attention")
    o, lse = attention_on_ring(attention, *arrays, exchange.own_heads(of_heads))
    o, lse = exchange.unbatched((o, lse))
    return (o, lse) if return_lse else o
