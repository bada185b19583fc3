"""LLaMA as computed on one device, for its slice of the batch and of the sequence.

The code below sees local tokens and, inside the train step's `shard_map`, the names of two mesh axes: the ring `sp` and
the tensor parallel `tp`. Without these axes, it is an ordinary Flax model on one device. Weights may be stored as
smaller shards; the function `gather` that is passed in gathers a layer's weights just before they are used.

Shape letters: B batch, T local length, D model, H query heads, K key heads, d head dim, F feed-forward, V
vocabulary, L layers. Parameters of the layers are stacked, [L, ...].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ringformer.models.interface import Axes
from ringformer.models.layer_scan import REMAT, scan_layers
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.rms_norm import RMSNorm, rms_norm
from ringformer.ops import layouts
from ringformer.ops.argument_checks import AnyArray, Segments
from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.tokenwise import rope
from ringformer.ops.tokenwise.blockwise_feedforward import blockwise_feedforward, swiglu
from ringformer.ops.tokenwise.cross_entropy import cross_entropy, token_cross_entropy
from ringformer.ops.tokenwise.embedding import embed

Rotation = tuple[Float32[Array, "#B T half"], Float32[Array, "#B T half"]]
"""(cos, sin) for the pairs of features of a head, at each token."""


class Attention(nnx.Module):
    """Pre-norm causal self-attention with rotary positions and grouped key heads.

    Each group of heads recomputes the norm, so its output is never kept. With tp, x and the result are the rank's part
    t of the local tokens T, and the rotation covers all T; without tp, t is T. `attend(q, k, v)` gets rotated q and k.
    It returns the outputs and anything that it keeps, and the module returns both.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.wq = _normal(config, rngs, "DHd")
        self.wk = _normal(config, rngs, "DKd")
        self.wv = _normal(config, rngs, "DKd")
        self.wo = _normal(config, rngs, "HdD")

    def __call__(
        self,
        x: Float[Array, "B t D"],
        norm: RMSNorm,
        rotation: Rotation,
        axes: Axes,
        attend: Callable,
    ) -> tuple[Float[Array, "B t D"], Any]:
        c, x = self.config, _enter_tp(x, axes)
        wq, wk, wv, wo = (w[...].astype(x.dtype) for w in (self.wq, self.wk, self.wv, self.wo))
        K = max(1, wq.shape[1] * c.num_kv_heads // c.num_heads)  # key heads that the queries here read
        if wk.shape[1] > K:
            # With fewer key heads than tp ranks, the weights are not sharded over tp, and each rank uses one head.
            head = lax.axis_index(axes.tp) * c.num_kv_heads // lax.axis_size(axes.tp)
            wk, wv = (lax.dynamic_slice_in_dim(w, head, 1, axis=1) for w in (wk, wv))
        of_heads: Callable = partial(self._of_heads, x, norm.scale[...], rotation, attend)
        if c.head_groups == 1:
            o, kept = of_heads(wq, wk, wv)
            y = jnp.einsum("bthd,hdD->btD", o, wo)
        else:
            # A group's backward recomputes the projections q, k, v; its o, m and l are kept.
            of_heads = jax.checkpoint(of_heads, policy=REMAT["attention"], prevent_cse=False)
            groups = [rearrange(w, "D (g h) d -> g D h d", g=c.head_groups) for w in (wq, wk, wv)]
            _, (o, kept) = lax.scan(lambda _, group: (None, of_heads(*group)), None, groups)
            y = jnp.einsum("gbthd,ghdD->btD", o, rearrange(wo, "(g h) d D -> g h d D", g=c.head_groups))
        return _leave_tp(y, axes), kept

    def _of_heads(self, x, scale, rotation, attend, wq, wk, wv):
        """Return the outputs [B, T, h, d] of some heads for x [B, T, D], and `kept`. The weights are the columns of
        these heads."""
        x = rms_norm(x, scale, self.config.norm_eps)
        q, k, v = (jnp.einsum("btD,Dhd->bthd", x, w) for w in (wq, wk, wv))
        return attend(rope.rotate(q, rotation), rope.rotate(k, rotation), v)


class FeedForward(nnx.Module):
    """Pre-norm SwiGLU. The norm and SwiGLU run chunk by chunk, like the paper's blockwise computation."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.w_gate = _normal(config, rngs, "DF")
        self.w_up = _normal(config, rngs, "DF")
        self.w_down = _normal(config, rngs, "FD")

    def __call__(self, x: Float[Array, "B T D"], norm: RMSNorm, axes: Axes) -> Float[Array, "B T D"]:
        x = _enter_tp(x, axes)
        weights = norm.scale[...], tuple(w[...].astype(x.dtype) for w in (self.w_gate, self.w_up, self.w_down))

        def function(weights, x):
            return swiglu(weights[1], rms_norm(x, weights[0], self.config.norm_eps))

        if self.config.attention in ("blockwise", "ring"):
            y = blockwise_feedforward(function, weights, x, self.config.ffn_chunk)
        else:
            y = function(weights, x)
        return _leave_tp(y, axes)


class Layer(nnx.Module):
    """Attention and feed-forward, each added to the residual stream; also returns what `attend` keeps."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.feedforward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feedforward = FeedForward(config, rngs)

    def __call__(
        self,
        x: Float[Array, "B t D"],
        rotation: Rotation,
        axes: Axes,
        attend: Callable,
    ) -> tuple[Float[Array, "B t D"], Any]:
        with jax.named_scope("attention"):
            y, kept = self.attention(x, self.attention_norm, rotation, axes, attend)
            x = x + y
        with jax.named_scope("feed_forward"):
            return x + self.feedforward(x, self.feedforward_norm, axes), kept


class Llama(nnx.Module):
    """The decoder: embedding, L equal layers (one `lax.scan`), norm, output head.

    On one device, `Llama(config, rngs=nnx.Rngs(0))(tokens)` returns logits. Inside a `shard_map`, B and T are local to
    the device, and `axes` names the ring and tensor parallel axes. `gather(name, weights)` then gathers the weights of
    "embed", "layers" (those of one layer), "norm" or "head".
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = _normal(config, rngs, "VD")
        # Plain vmap over plain arrays: nnx's transforms cost milliseconds of dispatch per call.
        definition = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0))))
        keys = jax.random.split(rngs.params(), config.num_layers)
        stacked = jax.vmap(lambda key: nnx.as_pure(nnx.state(Layer(config, nnx.Rngs(key)))))(keys)
        self.layers = nnx.merge(definition, stacked)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tie_embeddings:
            self.head = _normal(config, rngs, "DV")

    def __call__(
        self,
        tokens: Int[AnyArray, "B T"],
        positions: Int[AnyArray, "#B T"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        *,
        segments: Segments = "any",
        axes: Axes = Axes(),
        gather: Callable | None = None,
    ) -> Float32[Array, "B T V"]:
        """Compute the logits of the next token.

        Positions default to each token's place in the sequence; on a ring, the config's layout determines it. Without
        segment_ids, the sequence is one document; `segments` as in `ring_attention`.
        """
        x = self.hidden(tokens, positions, segment_ids, segments=segments, axes=axes, gather=gather)
        return jnp.einsum("btd,dv->btv", x, self._head(x.dtype, gather), preferred_element_type=jnp.float32)

    def loss(self, batch: Any, *, axes: Axes = Axes(), gather: Callable | None = None) -> Float32[Array, ""]:
        """Sum -log p(target) over this device's masked-in tokens; see `ringformer.data.Batch`."""
        x = self._of_batch(batch, axes, gather)
        with jax.named_scope("loss"):
            return cross_entropy(x, self._head(x.dtype, gather), batch.targets, batch.mask, self.config.loss_chunk)

    def token_losses(self, batch: Any, *, axes: Axes = Axes(), gather: Callable | None = None) -> Float32[Array, "B T"]:
        """Compute -log p(target) of each of this device's tokens regardless of the mask, for evaluation."""
        x = self._of_batch(batch, axes, gather)
        return token_cross_entropy(x, self._head(x.dtype, gather), batch.targets, self.config.loss_chunk)

    def _of_batch(self, batch: Any, axes: Axes, gather: Callable | None):
        """Compute `hidden` of a batch, whose segment ids ascend (`ringformer.data.Batch`)."""
        ids = batch.segment_ids
        return self.hidden(batch.tokens, batch.positions, ids, segments="ascending", axes=axes, gather=gather)

    def hidden(
        self,
        tokens: Int[AnyArray, "B T"],
        positions: Int[AnyArray, "#B T"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        *,
        segments: Segments = "any",
        axes: Axes = Axes(),
        gather: Callable | None = None,
    ) -> Float[Array, "B T D"]:
        """Compute the normed output of the last layer, in the compute dtype; arguments as in `__call__`."""
        return self.attended(tokens, positions, segment_ids, segments, axes=axes, gather=gather)[0]

    def attended(
        self,
        tokens,
        positions=None,
        segment_ids=None,
        segments="any",
        *,
        axes=Axes(),
        gather=None,
        attend=None,
        given=None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Compute `hidden`, and return it with what each layer kept, stacked [L, ...]. `attend(given, q, k, v) -> (o,
        kept)` replaces the config's attention: q and k are rotated, and `given` is the layer's part of an argument that
        is also stacked. Remat groups keep nothing."""
        c = self.config
        if c.attention != "ring" and axes.sp is not None and lax.axis_size(axes.sp) > 1:
            raise ValueError(f"attention {c.attention!r} needs the whole sequence on a device: sp=1, or 'ring'")
        gather = gather or (lambda _, weights: weights)
        with jax.named_scope("embedding"):
            x = embed(gather("embed", self.embed[...]).astype(c.compute_dtype), tokens)
        positions, segment_ids = (None if a is None else _enter_tp(a, axes) for a in (positions, segment_ids))
        if positions is None:
            positions = self._places(tokens.shape[1], axes)
        frequencies = rope.frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        rotation = rope.rotations(positions, frequencies, c.rope_scaling.amplitude)
        definition, stacked = nnx.split(self.layers)

        def layer(x, of_layer, shared):
            (weights, given), (rotation, segment_ids) = of_layer, shared
            own = partial(_attend, c, axes, segment_ids, segments) if attend is None else partial(attend, given)
            return nnx.merge(definition, gather("layers", weights))(x, rotation, axes, own)

        x, kept = scan_layers(layer, c, x, (nnx.to_pure_dict(stacked), given), (rotation, segment_ids))
        return self.norm(x), kept

    def _places(self, length: int, axes: Axes):
        """Return the positions of this device's tokens, int32 [1, T]. `length` is the number of tokens that a tp rank
        holds."""
        length *= 1 if axes.tp is None else lax.axis_size(axes.tp)
        if axes.sp is None or self.config.attention != "ring":
            return jnp.arange(length, dtype=jnp.int32)[None]
        return layouts.positions(self.config.layout, length, axes.sp, self.config.ulysses, axes.rings)[None]

    def _head(self, dtype, gather):
        """Return the output head [D, V] in the compute dtype."""
        gather = gather or (lambda _, weights: weights)
        if self.config.tie_embeddings:
            return gather("embed", self.embed[...]).astype(dtype).T
        return gather("head", self.head[...]).astype(dtype)


def _attend(c: LlamaConfig, axes: Axes, segment_ids, segments: Segments, q, k, v) -> tuple[Any, None]:
    """Compute the config's attention, which keeps nothing."""
    if c.attention == "vanilla":
        return dense_attention(q, k, v, segment_ids=segment_ids, window=c.window or None), None
    ring = c.attention == "ring" and axes.sp is not None
    o = ring_attention(
        q,
        k,
        v,
        axis_name=axes.sp if ring else None,
        layout=c.layout if ring else "contiguous",
        segment_ids=segment_ids,
        segments=segments,
        q_chunk=c.q_chunk,
        k_chunk=c.k_chunk,
        kernel="xla" if c.kernel == "auto" else c.kernel,
        ulysses=c.ulysses if ring else 1,
        ring=c.ring,
        rings=axes.rings if ring else 1,
        window=c.window or None,
    )
    return o, None


def _normal(config: LlamaConfig, rngs: nnx.Rngs, letters: str) -> nnx.Param:
    """Draw a float32 parameter of the shape spelled by its letters, normal with the config's standard deviation."""
    sizes = config.sizes
    shape = tuple(sizes[letter] for letter in letters)
    return nnx.Param(config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32), letters=letters)


def _enter_tp(x, axes: Axes):
    """Gather the residual stream, sharded along the sequence over tp, to its full local length (Megatron's g-bar)."""
    return x if axes.tp is None else lax.all_gather(x, axes.tp, axis=1, tiled=True)


def _leave_tp(x, axes: Axes):
    """Sum the tp ranks' partial results, and shard the sum along the sequence again."""
    return x if axes.tp is None else lax.psum_scatter(x, axes.tp, scatter_dimension=1, tiled=True)
