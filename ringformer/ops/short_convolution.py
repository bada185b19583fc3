"""A short causal convolution of each channel, along a sequence that is distributed over a ring.

A token reads itself and the W - 1 tokens before it. The first tokens of a shard's interval read the tail of the
interval before, which is on a neighbour (`layouts.py`); tokens of another document count as zeros.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringformer.ops import layouts
from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.layouts import Layout
from ringformer.ops.simulated_devices import after
from ringformer.ops.varying_axes import vary, varying_axes


def short_convolution(
    x: Float[AnyArray, "B T c"],
    weight: Float[AnyArray, "c W"],
    *,
    axis_name: str | None,
    layout: Layout = "contiguous",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    ulysses: int = 1,
    rings: int = 1,
) -> Float[Array, "B T c"]:
    """Return y_t = sum_j weight_j x_{t - W + 1 + j} of this device's tokens, in x's dtype with float32 sums.

    Call it inside `shard_map`, with the arrays of one device. The last weight is that of the token itself, as in
    PyTorch's causal `conv1d`.

    Args:
      axis_name, layout, ulysses, rings: as in `ring_delta_rule`.
      segment_ids: documents; a token reads only its own.

    Raises:
      ValueError: the shapes do not fit, or an interval of the sequence on a device is shorter than W - 1.
    """
    B, T, c = x.shape
    W = weight.shape[1]
    if weight.shape[0] != c:
        raise ValueError(f"weight {weight.shape} of {c} channels")
    layouts.check_name(layout)
    if layout not in layouts.WINDOWED:
        raise ValueError(f"layout={layout!r}: no two of its tokens are neighbours; use layout='zigzag' or 'contiguous'")
    count = layouts.interval_count(layout, ulysses) if axis_name else 1
    if T % count or T // count < W - 1:
        raise ValueError(f"{T} tokens of a device in {count} intervals are too short for a convolution of {W}")
    axes = varying_axes((x, segment_ids)) | ({axis_name} if axis_name else set())
    tokens, weights, ids = vary(jax.tree.map(jnp.asarray, (x, weight, segment_ids)), axes)
    values = tokens.reshape(B, count, -1, c)
    padded = jnp.concatenate([_tails(values, W - 1, axis_name, layout, ulysses, rings), values], axis=2)
    if ids is not None:
        own = after(ids, tokens).reshape(B, count, -1)
        ids = jnp.concatenate([_tails(own, W - 1, axis_name, layout, ulysses, rings), own], axis=2)
    length = T // count
    y = jnp.zeros(values.shape, jnp.float32)
    for j in range(W):
        term = padded[:, :, j : j + length].astype(jnp.float32) * weights[:, j].astype(jnp.float32)
        if ids is not None:
            same = ids[:, :, j : j + length] == ids[:, :, W - 1 :]
            term = jnp.where(same[..., None], term, 0)
        y += term
    return y.reshape(x.shape).astype(x.dtype)


def _tails(x, tokens: int, axis_name: str | None, layout: Layout, ulysses: int, rings: int):
    """Return the last tokens of the interval before each of this device's intervals, [B, intervals, tokens, ...]; zeros
    before the first one."""
    nothing = jnp.zeros_like(x[:, :, :tokens])
    if axis_name is None:
        return nothing
    size = layouts.ring_size_of(axis_name, ulysses, rings)
    line = layouts.intervals(layout, size, ulysses)
    moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (source, part), (target, target_part) in pairwise(line):
        of_parts = moves.setdefault((part, target_part), [])
        for ring in range(rings):
            first = ring * size * ulysses
            of_parts.append((first + source, first + target))
    arrived = [nothing[:, i] for i in range(x.shape[1])]
    for (part, target_part), of_parts in moves.items():
        # Each interval has one before it, so all but one of the summands are the zeros of devices that none sends to.
        arrived[target_part] += lax.ppermute(x[:, part, -tokens:], axis_name, of_parts)
    return jnp.stack(arrived, axis=1)
