"""Layers of a decoder as computed on one device: attention and feed-forward, made of the parts of a family.

Shape letters as in `decoder.py`. With tp, x and the result are a rank's part t of the local tokens T.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.interface import Axes
from ringformer.models.layer_kinds import LayerKind
from ringformer.models.layer_scan import REMAT
from ringformer.models.rms_norm import RMSNorm, rms_norm
from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.ops.tokenwise import rope
from ringformer.ops.tokenwise.blockwise_feedforward import ACTIVATIONS, blockwise_feedforward, gated
from ringformer.ops.work_list import default_chunk


def attention_options(c: DecoderConfig, kind: LayerKind, tokens: int) -> dict[str, Any]:
    """Return the options of `ring_attention` for the layers of a kind: scale, window, kernel and chunks.

    If only some layers have a window, their chunks are at most a quarter of it, or `FEWEST_IN_WINDOW` tokens, and
    kernels without windows leave them to XLA.

    Args:
      tokens: tokens of a rank of the ring.
    """
    kernel = "xla" if c.kernel == "auto" else c.kernel
    chunks = {"q_chunk": c.q_chunk, "k_chunk": c.k_chunk}
    if kind.window and len(c.windows) > 1:
        kernel = "xla" if BLOCK_KERNELS[kernel].whole_parts else kernel
        most = max(FEWEST_IN_WINDOW[kernel], kind.window // 4 // LANES * LANES)
        chunks = {name: min(chunk or default_chunk(tokens), most) for name, chunk in chunks.items()}
    return {"scale": c.logit_scale, "window": kind.window or None, "kernel": kernel, **chunks}


FEWEST_IN_WINDOW = {"pallas": 512, "xla": 128}
"""Tokens of the smallest chunks for a window: smaller ones waste more of the kernel's time than larger ones of the
window."""


class Placement(NamedTuple):
    """Positions of tokens, as the heads of some layers see them."""

    rotation: tuple[Float32[Array, "#B T half"], Float32[Array, "#B T half"]] | None
    """(cos, sin) for the pairs of features of a head, at each token; None: heads see no positions."""
    query_scale: Float32[Array, "#B T"] | None
    """Factor of the rotated queries of a token; None: 1."""

    def __call__(self, q: Float[Array, "B T H d"], k: Float[Array, "B T K d"]):
        """Rotate queries and keys, and scale queries."""
        if self.rotation is None:
            return q, k
        cos, sin = self.rotation
        if self.query_scale is not None:
            cos, sin = (x * self.query_scale[..., None] for x in (cos, sin))
        return rope.rotate(q, (cos, sin)), rope.rotate(k, self.rotation)


def placements(c: DecoderConfig, positions: Int[AnyArray, "#B T"]) -> tuple[Placement, ...]:
    """Return the `Placement` of tokens for each of `DecoderConfig.ropes`."""
    scale = c.query_scale(positions)
    placed = []
    for frequencies in c.ropes:
        rotation = None
        if frequencies is not None:
            theta, scaling = frequencies
            rotation = rope.rotations(positions, rope.frequencies(c.head_dim, theta, scaling), scaling.amplitude)
        placed.append(Placement(rotation, scale))
    return tuple(placed)


OF_KEY_HEADS = {"wk", "wv", "bk", "bv", "k_norm"}
"""Parameters of an `Attention` that have the key heads."""


class Attention(nnx.Module):
    """Causal self-attention with grouped key heads; its parts are those of the family.

    Each group of heads recomputes the norm before it, so the norm's output is never kept. With tp, x and the result are
    the rank's part t of the local tokens T, and the placement covers all T; without tp, t is T. `attend(q, k, v)` gets
    rotated q and k. It returns the outputs and anything that it keeps, and the module returns both.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.wq = normal(config, rngs, "DHd")
        self.wk = normal(config, rngs, "DKd")
        self.wv = normal(config, rngs, "DKd")
        self.wo = normal(config, rngs, "HdD")
        sizes = config.sizes
        if config.PARTS.bias:
            self.bq, self.bk, self.bv = (
                nnx.Param(jnp.zeros((sizes[heads], sizes["d"]), jnp.float32), letters=f"{heads}d") for heads in "HKK"
            )
        if config.PARTS.qk_norm:
            neutral = 1 - config.PARTS.norm_offset
            self.q_norm, self.k_norm = (
                nnx.Param(jnp.full([sizes[i] for i in letters], neutral, jnp.float32), letters=letters)
                for letters in (("d", "d") if config.PARTS.qk_norm == "head" else ("Hd", "Kd"))
            )

    def __call__(
        self,
        x: Float[Array, "B t D"],
        norm: RMSNorm | None,
        placement: Placement,
        axes: Axes,
        attend: Callable,
    ) -> tuple[Float[Array, "B t D"], Any]:
        c = self.config
        x = enter_tp(x, axes)
        names = ["wq", "wk", "wv", *(("bq", "bk", "bv") if c.PARTS.bias else ())]
        names += ("q_norm", "k_norm") if c.PARTS.qk_norm == "width" else ()
        weights = {name: getattr(self, name)[...].astype(x.dtype) for name in names}  # [..., heads, d]
        wo = self.wo[...].astype(x.dtype)
        K = max(1, wo.shape[0] * c.num_kv_heads // c.num_heads)  # key heads that the queries here read
        if weights["wk"].shape[1] > K:
            # With fewer key heads than tp ranks, the weights are not sharded over tp, and each rank uses one head.
            head = lax.axis_index(axes.tp) * c.num_kv_heads // lax.axis_size(axes.tp)
            for name in [name for name in names if name in OF_KEY_HEADS]:
                w = weights[name]
                weights[name] = lax.dynamic_slice_in_dim(w, head, 1, axis=w.ndim - 2)
        of_each_head = list(weights.values())
        scale = None if norm is None else norm.scale[...]
        of_heads: Callable = partial(self._of_heads, x, scale, placement, attend, axes)
        if c.head_groups == 1:
            o, kept = of_heads(*of_each_head)
            y = jnp.einsum("bthd,hdD->btD", o, wo)
        else:
            # A group's backward recomputes the projections q, k, v; its o, m and l are kept.
            of_heads = jax.checkpoint(of_heads, policy=REMAT["attention"], prevent_cse=False)
            groups = [rearrange(w, "... (g h) d -> g ... h d", g=c.head_groups) for w in of_each_head]
            _, (o, kept) = lax.scan(lambda _, group: (None, of_heads(*group)), None, groups)
            y = jnp.einsum("gbthd,ghdD->btD", o, rearrange(wo, "(g h) d D -> g h d D", g=c.head_groups))
        return _leave_tp(y, axes), kept

    def _of_heads(self, x, scale, placement, attend, axes, wq, wk, wv, *more):
        """Return the outputs [B, T, h, d] of some heads for x [B, T, D], and `kept`. The weights are the columns of
        these heads; `more` are their biases, and the scales of a norm over all heads."""
        parts = self.config.PARTS
        eps = self.config.norm_eps
        if scale is not None:
            x = rms_norm(x, scale, eps, parts.norm_offset)
        q, k, v = (jnp.einsum("btD,Dhd->bthd", x, w) for w in (wq, wk, wv))
        biases = more[:3] if parts.bias else ()
        norms = more[-2:] if parts.qk_norm == "width" else ()
        if parts.qk_norm == "head":
            norms = self.q_norm[...], self.k_norm[...]
        q, k, v = with_parts(self.config, q, k, v, biases, norms, axes.tp)
        return attend(*placement(q, k), v)


def with_parts(c: DecoderConfig, q, k, v, biases: Sequence, norms: Sequence, tp: str | None):
    """Add biases to q, k and v, and normalise q and k, if the family does.

    Args:
      biases: of q, k and v, or none. norms: scales of q and k, or none. tp: axis that shares the heads.
    """
    if biases:
        q, k, v = (y + b for y, b in zip((q, k, v), biases, strict=True))
    if norms:
        one_head = c.PARTS.qk_norm == "head"
        eps = c.norm_eps
        offset = c.PARTS.norm_offset
        q, k = (
            rms_norm(y, scale, eps, offset) if one_head else width_norm(y, scale, eps, tp)
            for y, scale in zip((q, k), norms, strict=True)
        )
    return q, k, v


def width_norm(x: Float[Array, "B T h d"], scale: Float[Array, "h d"], eps: float, tp: str | None):
    """Divide x by the root of its mean square over all heads, those of other tp ranks included, and multiply by the
    scale, in float32; return x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=(-2, -1), keepdims=True)
    if tp is not None:
        mean = lax.pmean(mean, tp)
    return (wide * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)).astype(x.dtype)


class FeedForward(nnx.Module):
    """Gated feed-forward. The norm before it and the feed-forward run chunk by chunk, like the paper's blockwise
    computation."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.w_gate = normal(config, rngs, "DF")
        self.w_up = normal(config, rngs, "DF")
        self.w_down = normal(config, rngs, "FD")

    def __call__(self, x: Float[Array, "B T D"], norm: RMSNorm | None, axes: Axes) -> Float[Array, "B T D"]:
        x = enter_tp(x, axes)
        c = self.config
        scale = None if norm is None else norm.scale[...]
        weights = scale, tuple(w[...].astype(x.dtype) for w in (self.w_gate, self.w_up, self.w_down))

        def function(weights, x):
            scale, projections = weights
            if scale is not None:
                x = rms_norm(x, scale, c.norm_eps, c.PARTS.norm_offset)
            return gated(projections, x, ACTIVATIONS[c.PARTS.activation])

        if c.on_ring or c.attention == "blockwise":
            y = blockwise_feedforward(function, weights, x, c.ffn_chunk)
        else:
            y = function(weights, x)
        return _leave_tp(y, axes)


class Layer(nnx.Module):
    """Attention and feed-forward, each added to the residual stream; also returns what `attend` keeps."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        before = config.PARTS.norms != "after"
        after = config.PARTS.norms != "before"
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, config.PARTS.norm_offset)
        if before:
            self.attention_norm = norm()
        self.attention = Attention(config, rngs)
        if before:
            self.feedforward_norm = norm()
        self.feedforward = FeedForward(config, rngs)
        if after:
            self.attention_output_norm = norm()
            self.feedforward_output_norm = norm()

    def __call__(
        self,
        x: Float[Array, "B t D"],
        placement: Placement,
        axes: Axes,
        attend: Callable,
    ) -> tuple[Float[Array, "B t D"], Any]:
        norms = self.config.PARTS.norms
        with jax.named_scope("attention"):
            norm = None if norms == "after" else self.attention_norm
            y, kept = self.attention(x, norm, placement, axes, attend)
            x = x + (y if norms == "before" else self.attention_output_norm(y))
        with jax.named_scope("feed_forward"):
            y = self.feedforward(x, None if norms == "after" else self.feedforward_norm, axes)
            return x + (y if norms == "before" else self.feedforward_output_norm(y)), kept


def normal(config: DecoderConfig, rngs: nnx.Rngs, letters: str) -> nnx.Param:
    """Draw a float32 parameter of the shape spelled by its letters, normal with the config's standard deviation."""
    sizes = config.sizes
    shape = tuple(sizes[letter] for letter in letters)
    return nnx.Param(config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32), letters=letters)


def enter_tp(x, axes: Axes):
    """Gather the residual stream, sharded along the sequence over tp, to its full local length (Megatron's g-bar)."""
    return x if axes.tp is None else lax.all_gather(x, axes.tp, axis=1, tiled=True)


def _leave_tp(x, axes: Axes):
    """Sum the tp ranks' partial results, and shard the sum along the sequence again."""
    return x if axes.tp is None else lax.psum_scatter(x, axes.tp, scatter_dimension=1, tiled=True)
