"""A decoder as computed on one device, for its slice of the batch and of the sequence.

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
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ringformer.models.attention_options import attention_options
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.initialization import normal
from ringformer.models.interface import Axes
from ringformer.models.layer import Layer
from ringformer.models.layer_kinds import LayerKind
from ringformer.models.layer_scan import scan_layers
from ringformer.models.placement import placements
from ringformer.models.rms_norm import RMSNorm
from ringformer.models.tensor_parallel import enter_tp
from ringformer.ops import layouts
from ringformer.ops.argument_checks import AnyArray, Segments
from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.tokenwise.cross_entropy import cross_entropy, token_cross_entropy, token_scores
from ringformer.ops.tokenwise.embedding import embed


class Decoder(nnx.Module):
    """Embedding, L layers (one `lax.scan` if they are equal, else one for each run of `DecoderConfig.periods`), norm,
    output head. Any family of `models/families/` is such a decoder.

    On one device, `Decoder(config, rngs=nnx.Rngs(0))(tokens)` returns logits. Inside a `shard_map`, B and T are local
    to the device, and `axes` names the ring and tensor parallel axes. `gather(name, weights)` then gathers the weights
    of "embed", "layers" (those of one layer), "norm" or "head".
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed: nnx.Param[Any] = normal(config, rngs, "VD")
        # Plain vmap over plain arrays: nnx's transforms cost milliseconds of dispatch per call.
        definition = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0))))
        keys = jax.random.split(rngs.params(), config.num_layers)
        stacked = jax.vmap(lambda key: nnx.as_pure(nnx.state(Layer(config, nnx.Rngs(key)))))(keys)
        self.layers: Any = nnx.merge(definition, stacked)
        self.norm: RMSNorm = RMSNorm(config.hidden_size, config.norm_eps, config.PARTS.norm_offset)
        if not config.tie_embeddings:
            self.head: nnx.Param[Any] = normal(config, rngs, "DV")

    def __call__(
        self,
        tokens: Int[AnyArray, "B T"],
        positions: Int[AnyArray, "#B T"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        *,
        segments: Segments = "any",
        axes: Axes = Axes(),
        gather: Callable[..., Any] | None = None,
    ) -> Float32[Array, "B T V"]:
        """Compute the logits of the next token.

        Positions default to each token's place in the sequence; on a ring, the config's layout determines it. Without
        segment_ids, the sequence is one document; `segments` as in `ring_attention`.
        """
        x = self.hidden(tokens, positions, segment_ids, segments=segments, axes=axes, gather=gather)
        return jnp.einsum("btd,dv->btv", x, self._head(x.dtype, gather), preferred_element_type=jnp.float32)

    def loss(self, batch: Any, *, axes: Axes = Axes(), gather: Callable[..., Any] | None = None) -> Float32[Array, ""]:
        """Sum -log p(target) over this device's masked-in tokens; see `ringformer.data.Batch`."""
        x = self._of_batch(batch, axes, gather)
        with jax.named_scope("loss"):
            return cross_entropy(x, self._head(x.dtype, gather), batch.targets, batch.mask, self.config.loss_chunk)

    def token_losses(
        self, batch: Any, *, axes: Axes = Axes(), gather: Callable[..., Any] | None = None
    ) -> Float32[Array, "B T"]:
        """Compute -log p(target) of each of this device's tokens regardless of the mask, for evaluation."""
        x = self._of_batch(batch, axes, gather)
        return token_cross_entropy(x, self._head(x.dtype, gather), batch.targets, self.config.loss_chunk)

    def scores(
        self, x: jax.Array, targets: Int[AnyArray, "B T"], gather: Callable[..., Any] | None = None
    ) -> tuple[Any, Any]:
        """Compute `token_scores` of tokens with the output x [B, T, D] of `hidden`, for inference."""
        return token_scores(x, self._head(x.dtype, gather), targets, self.config.loss_chunk)

    def _of_batch(self, batch: Any, axes: Axes, gather: Callable[..., Any] | None):
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
        gather: Callable[..., Any] | None = None,
    ) -> Float[Array, "B T D"]:
        """Compute the normed output of the last layer, in the compute dtype; arguments as in `__call__`."""
        return self.attended(tokens, positions, segment_ids, segments, axes=axes, gather=gather)[0]

    def attended(
        self,
        tokens: Any,
        positions: Any = None,
        segment_ids: Any = None,
        segments: Segments = "any",
        *,
        axes: Axes = Axes(),
        gather: Callable[..., Any] | None = None,
        attend: Callable[..., Any] | None = None,
        given: Any = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Compute `hidden`, and return it with what each layer kept, stacked [L, ...]. `attend(kind, given, q, k, v) ->
        (o, kept)` replaces the config's attention: q and k are rotated, and `given` is the part of a layer of this kind
        of an argument that is also stacked. Remat groups keep nothing."""
        c = self.config
        if not c.on_ring and axes.sp is not None and lax.axis_size(axes.sp) > 1:
            raise ValueError(f"attention {c.attention!r} needs the whole sequence on a device: sp=1, or 'ring'")
        gather = gather or (lambda _, weights: weights)
        with jax.named_scope("embedding"):
            x = embed(gather("embed", self.embed[...]).astype(c.compute_dtype), tokens)
            if c.embedding_scale is not None:
                x *= jnp.asarray(c.embedding_scale, x.dtype)
        if positions is None:
            positions = self._places(tokens.shape[1], axes)
        else:
            positions = enter_tp(positions, axes)
        if segment_ids is not None:
            segment_ids = enter_tp(segment_ids, axes)
        definition, stacked = nnx.split(self.layers)

        def layer(kind: LayerKind, x, of_layer, shared):
            weights, given = of_layer
            placed, segment_ids = shared
            own = partial(_attend, c, kind, axes, segment_ids, segments)
            if attend is not None:
                own = partial(attend, kind, given)
            return nnx.merge(definition, gather("layers", weights))(x, placed[c.ropes.index(kind.rope)], axes, own)

        shared = placements(c, positions), segment_ids
        x, kept = scan_layers(layer, c, x, (nnx.to_pure_dict(stacked), given), shared)
        return self.norm(x), kept

    def _places(self, length: int, axes: Axes):
        """Return the positions of this device's tokens, int32 [1, T]. `length` is the number of tokens that a tp rank
        holds."""
        if axes.tp is not None:
            length *= lax.axis_size(axes.tp)
        if axes.sp is None or not self.config.on_ring:
            return jnp.arange(length, dtype=jnp.int32)[None]
        return layouts.positions(self.config.layout, length, axes.sp, self.config.ulysses, axes.rings)[None]

    def _head(self, dtype, gather):
        """Return the output head [D, V] in the compute dtype."""
        gather = gather or (lambda _, weights: weights)
        if self.config.tie_embeddings:
            return gather("embed", self.embed[...]).astype(dtype).T
        return gather("head", self.head[...]).astype(dtype)


def _attend(
    c: DecoderConfig, kind: LayerKind, axes: Axes, segment_ids, segments: Segments, q, k, v
) -> tuple[Any, None]:
    """Compute the config's attention, which keeps nothing."""
    if c.attention == "vanilla":
        return dense_attention(q, k, v, segment_ids=segment_ids, scale=c.logit_scale, window=kind.window or None), None
    place: dict[str, Any] = {"axis_name": None, "layout": "contiguous", "ulysses": 1, "rings": 1}
    parts = 1
    if c.on_ring and axes.sp is not None:
        place = {"axis_name": axes.sp, "layout": c.layout, "ulysses": c.ulysses, "rings": axes.rings}
        parts = c.sequence_parts(layouts.ring_size_of(axes.sp, c.ulysses, axes.rings))
    tokens = place["ulysses"] * q.shape[1]
    options = attention_options(c, kind, tokens, documents=segment_ids is not None, parts=parts)
    o = c.attend(q, k, v, segment_ids=segment_ids, segments=segments, ring=c.ring, **place, **options)
    return o, None
