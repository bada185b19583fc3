"""The gated delta rule along a sequence that is distributed over a ring: no token moves, only states.

    forward     each piece's map (M, U) -> exchange -> the state before each piece -> outputs
    backward    the gradient of the state before each piece, by its outputs alone -> exchange with M^T -> the gradient
                of the state behind each piece -> gradients of the tokens

The outputs depend on M only through the state before a piece, which the second exchange differentiates. So M itself has
no gradient: the backward costs four forward passes instead of six.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from ringformer.ops import layouts
from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.delta_rule import chunks
from ringformer.ops.delta_rule.chunks import CHUNK, Block, Maps, Tokens
from ringformer.ops.delta_rule.state_exchange import States, states_before
from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.head_exchange import HeadExchange
from ringformer.ops.layouts import Layout
from ringformer.ops.ring import Ring
from ringformer.ops.simulated_devices import after
from ringformer.ops.varying_axes import vary, vary_like, varying_axes

SAVED_MAPS = "delta_rule_maps"
SAVED_STATES = "delta_rule_states"
"""`checkpoint_name`s of M and of the state before each piece; a remat policy that saves both avoids the first pass and
the exchange."""


def ring_delta_rule(
    q: Float[AnyArray, "B T K dk"],
    k: Float[AnyArray, "B T K dk"],
    v: Float[AnyArray, "B T H dv"],
    g: Float[AnyArray, "B T H"],
    beta: Float[AnyArray, "B T H"],
    *,
    axis_name: str | None,
    layout: Layout = "contiguous",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    scale: float | None = None,
    chunk: int = CHUNK,
    ulysses: int = 1,
    rings: int = 1,
) -> Float[Array, "B T H dv"]:
    """Compute the gated delta rule of this device's tokens, with the state that the tokens before them left, wherever
    on the ring they are (Gated Delta Networks, 2412.06464, equation 10).

    Call it inside `shard_map`, with the arrays of one device. Differentiable in q, k, v, g and beta by reverse mode.
    Products are in q's dtype; sums, states and what ranks exchange are float32.

    Args:
      q, k: queries and keys; keys must have norms of at most 1 (`beta` up to 2), or states grow.
      v: values; H is a multiple of K, and consecutive value heads share a key head.
      g: logarithm of the decay of the state before the token, at most 0.
      beta: how far the token corrects what is stored under its key.
      axis_name: the mesh axis of the ring, of any size. None: one device with the whole sequence.
      layout: contiguous or zigzag (`ringformer.ops.layouts`). A striped shard has no two neighbouring tokens.
      segment_ids: documents, each of them one interval of the sequence: its tokens see only itself.
      scale: factor of the queries, default dk**-0.5.
      chunk: tokens that are computed together, a power of 2.
      ulysses, rings: as in `ring_attention`; ulysses divides H.

    Raises:
      ValueError: shapes, dtypes or layout are inconsistent; the message names both sides.
      NotImplementedError: forward mode.
    """
    _check(q, k, v, g, beta, segment_ids, layout, chunk)
    _, T, H, _ = v.shape
    exchange = HeadExchange.of(axis_name, ulysses, H, k.shape[2])
    layouts.check_layout(layout, T * ulysses, 1, ulysses)
    ring = Ring(axis_name, layout if axis_name else "contiguous", "one_way", exchange, rings)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    arrays = (q * jnp.asarray(scale, q.dtype), k, v, g.astype(jnp.float32), beta.astype(jnp.float32), segment_ids)
    arrays = jax.tree.map(jnp.asarray, arrays)
    arrays = vary(arrays, varying_axes(arrays) | ({axis_name} if axis_name else set()))
    arrays = exchange.unbatched(arrays)
    *arrays, ids = reverse_mode_only(arrays, "ring_delta_rule")
    q, k = (exchange.to_heads(exchange.repeated(x)) for x in arrays[:2])
    v, g, beta = (exchange.to_heads(x) for x in arrays[2:])
    v, g, beta = (rearrange(x, "b t (K r) ... -> b t K r ...", K=k.shape[2]) for x in (v, g, beta))
    o = _on_ring(Options(ring, chunk), Tokens(q, k, v, g, beta, exchange.gathered(ids)))
    return exchange.to_tokens(rearrange(o, "b t K r d -> b t (K r) d"))


@dataclass(frozen=True)
class Options:
    """Static options of the op."""

    ring: Ring
    chunk: int


class Residuals(NamedTuple):
    """Arrays that the backward reads."""

    tokens: Tokens
    m: Float32[Array, "P B K r dk dk"] | None
    """None if the shard is one piece, and all of the sequence."""
    states: States
    """The state before each piece."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_ring(options: Options, tokens: Tokens) -> Float[Array, "B T K r dv"]:
    return _forward(options, tokens)[0]


def _forward(options: Options, tokens: Tokens):
    shard = _Shard.of(options, tokens)
    m = None
    if shard.is_sequence:
        states = shard.no_states
    else:
        maps = shard.by_parts(chunks.maps(shard.blocks))
        before = states_before(shard.ring, shard.rank, Maps(shard.gated(maps.m), maps.u))
        m = checkpoint_name(maps.m, SAVED_MAPS)
        states = checkpoint_name(shard.gated(before), SAVED_STATES)
    _, o = chunks.outputs(shard.by_rows(states), shard.blocks, tokens.q.dtype)
    length = tokens.q.shape[1] // shard.ring.parts
    return shard.by_tokens(o[:, :length]), Residuals(tokens, m, states)


def _backward(options: Options, residuals: Residuals, do: Float[Array, "B T K r dv"]):
    tokens = residuals.tokens
    dtype = tokens.q.dtype
    shard = _Shard.of(options, tokens)
    do = chunks.cut_values(_by_pieces(shard.ring, do), shard.blocks)
    behind = shard.no_states
    if residuals.m is not None:
        added = shard.by_parts(chunks.gradient_of_state(shard.blocks, do, dtype))
        maps = Maps(shard.gated(jnp.swapaxes(residuals.m, -1, -2)), shard.gated(added))
        behind = states_before(shard.ring, shard.rank, maps, backward=True)
    states, behind = (shard.by_rows(x) for x in (residuals.states, behind))
    gradients = chunks.gradients(states, shard.blocks, do, behind, dtype)
    whole = chunks.joined(gradients, _by_pieces(shard.ring, tokens))
    return (jax.tree.map(shard.by_tokens, whole),)


_on_ring.defvjp(_forward, _backward)


class _Shard(NamedTuple):
    """The pieces of a shard: each part of each row of the batch is a row of `blocks`."""

    ring: Ring
    rank: Int[Array, ""]
    blocks: Block
    goes_on: Bool[Array, "P B"] | None
    """True if the first token of a piece belongs to the document before it; None: always."""

    @classmethod
    def of(cls, options: Options, tokens: Tokens) -> "_Shard":
        ring = options.ring
        rank, q, ids = ring.rank_bound_to(tokens.q, tokens.ids)
        ids = after(ids, q)
        pieces = _by_pieces(ring, tokens._replace(q=q, ids=ids))
        shard = cls(ring, rank, chunks.cut(pieces, options.chunk), None)
        if ids is None or shard.is_sequence:
            return shard
        return shard._replace(goes_on=_goes_on(ring, rank, shard.by_parts(pieces.ids)))

    @property
    def is_sequence(self) -> bool:
        """True if the shard is one piece, and all of the sequence."""
        return self.ring.size * self.ring.parts == 1

    @property
    def no_states(self) -> States:
        rows, K, r, _, _, dv = self.blocks.v.shape[1:]
        zeros = jnp.zeros((rows, K, r, self.blocks.k.shape[-1], dv), jnp.float32)
        return self.by_parts(vary_like(zeros, self.blocks))

    def gated(self, x: Float32[Array, "P B *d"]) -> Float32[Array, "P B *d"]:
        """Return x with zeros for pieces that begin a document."""
        if self.goes_on is None:
            return x
        return jnp.where(self.goes_on.reshape(*self.goes_on.shape, *[1] * (x.ndim - 2)), x, 0)

    def by_tokens(self, x: Shaped[Array, "PB t *d"]) -> Shaped[Array, "B T *d"]:
        return rearrange(x, "(p b) t ... -> b (p t) ...", p=self.ring.parts)

    def by_parts(self, tree):
        """Separate the parts of the shard from the rows of the batch, in every array."""
        return jax.tree.map(lambda x: rearrange(x, "(p b) ... -> p b ...", p=self.ring.parts), tree)

    def by_rows(self, x: Shaped[Array, "P B *d"]) -> Shaped[Array, " PB *d"]:
        return rearrange(x, "p b ... -> (p b) ...")


def _by_pieces(ring: Ring, tree):
    """Make the parts of the shard rows of the batch, in every array [B, T, ...]."""
    return jax.tree.map(lambda x: rearrange(x, "b (p t) ... -> (p b) t ...", p=ring.parts), tree)


def _goes_on(ring: Ring, rank: Int[Array, ""], ids: Int[Array, "P B t"]) -> Bool[Array, "P B"]:
    """Return True for pieces whose first token belongs to the document of the token before it."""
    ranks, parts = np.transpose(layouts.places(ring.layout, ring.size))
    ends = ring.gather(ids[..., -1])[ranks, parts]
    own = jnp.stack(layouts.parts_before(ring.layout, ring.size, rank))
    return (ids[..., 0] == ends[own - 1]) & (own > 0)[:, None]


def _check(q, k, v, g, beta, segment_ids, layout: str, chunk: int) -> None:
    """Raise ValueError for arguments that are not those of a delta rule."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, g {g.shape}, beta {beta.shape}"
    B, T = q.shape[:2]
    if q.shape != k.shape or q.ndim != 4 or v.ndim != 4 or v.shape[:2] != (B, T) or v.shape[:3] != g.shape:
        raise ValueError(f"{shapes}: [B, T, K, dk] for q and k, [B, T, H, dv] for v and [B, T, H] for g are needed")
    if g.shape != beta.shape or v.shape[2] % k.shape[2]:
        raise ValueError(f"{shapes}: g and beta have a number for each value head, whose number is a multiple of K")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must have one dtype")
    if segment_ids is not None and segment_ids.shape != (B, T):
        raise ValueError(f"segment_ids {segment_ids.shape} of {(B, T)} tokens")
    layouts.check_name(layout)
    if layout not in layouts.WINDOWED:
        raise ValueError(f"layout={layout!r}: no two of its tokens are neighbours; use layout='zigzag' or 'contiguous'")
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk={chunk} must be a power of 2")
