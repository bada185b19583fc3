"""Decode step on one device: it runs one token of each row through a decoder with sharded weights and cache.

The residual stream is replicated over (tp, fsdp, sp). A layer communicates the columns of q, k and v (one all-gather
over fsdp and sp), the maximum and sum of the attention (over sp), and the partial sums after wo and the feed-forward.
It never moves a weight, nor anything that grows with the context.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ringformer.inference.cache.arrays import Cache, LayerCache, layer_cache
from ringformer.inference.cache.token_attention import attend_token
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.layer_kinds import LayerKind, scan_periods
from ringformer.models.own_attention import REGISTERED
from ringformer.models.placement import Placement, placements
from ringformer.models.rms_norm import rms_norm
from ringformer.models.share_products import ALL
from ringformer.ops.tokenwise.words import product
from ringformer.parallel.parameters import abstract_model


def decode_hidden(
    config: DecoderConfig,
    weights: dict[str, Any],
    cache: Cache,
    tokens: Int32[Array, " B"],
    positions: Int32[Array, " B"],
    slots: int,
    prefix: Cache | None = None,
    *,
    unroll: bool = False,
) -> tuple[Float[Array, "B D"], Float[Array, "L B 1 K d"], Float[Array, "L B 1 K d"]]:
    """Return the normed output of the last layer, and the rotated key and the value of every layer.

    Args:
      weights: the device's shares. tokens: one per row. positions: position of each token in its row, >= 0.
      slots: number of cache slots to read, from the first; all others are empty.
      prefix: cache of one row with which all rows begin.
      unroll: write the program of each layer, with its number as a constant, instead of a loop over the layers.
    """
    c = config
    x = _embed(weights["embed"], tokens)
    if c.embedding_scale is not None:
        x *= jnp.asarray(c.embedding_scale, x.dtype)
    model = nnx.merge(abstract_model(c)[0], weights)
    definition, state = nnx.split(model.layers)
    valid = {window: visible_slots(c, window, positions, cache.positions[:, :slots]) for window in c.windows}
    step = LayerStep(c, definition, placements(c, positions[:, None]), valid, cache, slots, prefix)
    through = step.one_after_another if unroll else step.in_a_loop
    x, k, v = through(x, nnx.to_pure_dict(state))
    return rms_norm(x, weights["norm"]["scale"], c.norm_eps, c.PARTS.norm_offset), k, v


class LayerStep(NamedTuple):
    """A token of each row on its way through the layers, and what all of them read besides their weights."""

    config: DecoderConfig
    definition: Any
    """Definition of a layer, without arrays."""
    placed: tuple[Placement, ...]
    """Placement of the tokens for each of `DecoderConfig.ropes`."""
    valid: dict[int, Bool[Array, "B S"]]
    """Slots that the tokens see, by the window of a layer."""
    cache: Cache
    slots: int
    prefix: Cache | None

    def layer(self, kind: LayerKind, x, given):
        """Run a layer; `given` are its number and its weights. Return x, and the token's key and value."""
        i, weights = given
        caches = [layer_cache(self.cache, i, self.slots)._replace(valid=self.valid[kind.window])]
        if self.prefix is not None:
            caches.append(layer_cache(self.prefix, i, self.prefix.positions.shape[1]))
        attend = partial(_attend, caches, self.config.logit_scale)
        placement = self.placed[self.config.ropes.index(kind.rope)]
        return nnx.merge(self.definition, weights).decode(x, placement, attend)

    def one_after_another(self, x, layers: dict[str, Any]):
        """Run all layers, with the number of each as a constant."""
        keys = []
        values = []
        for i, kind in enumerate(self.config.layer_kinds):
            x, (k, v) = self.layer(kind, x, (i, jax.tree.map(itemgetter(i), layers)))
            keys.append(k)
            values.append(v)
        return x, jnp.stack(keys), jnp.stack(values)

    def in_a_loop(self, x, layers: dict[str, Any]):
        """Run all layers in a loop, or in one for each run of equal ones.

        A part of the layers would be a copy of their weights: layers of several kinds are read by number.
        """
        numbers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        rows: Any = numbers

        def layer_of_number(kind: LayerKind, x, i):
            weights = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), layers)
            return self.layer(kind, x, (i, weights))

        run_layer: Callable[..., Any] = layer_of_number
        if len(set(self.config.layer_kinds)) == 1:
            run_layer = self.layer
            rows = numbers, layers

        def run(kind: LayerKind, x, rows, _):
            return lax.scan(partial(run_layer, kind), x, rows)

        x, (k, v) = scan_periods(self.config.periods, run, x, rows)
        return x, k, v


def visible_slots(
    c: DecoderConfig, window: int, positions: Int32[Array, " B"], of_slots: Int32[Array, "B S"]
) -> Bool[Array, "B S"]:
    """Return which cache slots the new token of each row sees in layers with a window; 0: it sees all before it.

    Args:
      positions: of the new tokens. of_slots: of the tokens in the slots, -1 for an empty slot.
    """
    query = positions[:, None]
    held = of_slots >= 0
    own = REGISTERED.get(c.attention)
    if own and own.visible:
        return held & own.visible(query, of_slots, window or None)
    return held & (of_slots > query - window) if window else held


def _attend(
    caches: Sequence[LayerCache],
    scale: float | None,
    q: Float[Array, "B 1 H d"],
    k: Float[Array, "B 1 K d"],
    v: Float[Array, "B 1 K d"],
):
    """Attend to the caches and to the token itself; the cache keeps k and v."""
    of_key_heads = rearrange(q, "b 1 (k g) d -> b k g d", k=k.shape[2])
    o = attend_token(of_key_heads, k[:, 0], v[:, 0], caches, "sp", scale)
    return rearrange(o, "b k g d -> b 1 (k g) d"), (k, v)


def next_logits(config: DecoderConfig, weights: dict[str, Any], x: Float[Array, "B D"]) -> Float32[Array, "B V"]:
    """Compute the logits of the next token of each row, on every device, from normed hidden states."""
    if config.tie_embeddings:
        share = jnp.einsum("bD,vD->bv", x, weights["embed"], preferred_element_type=jnp.float32)
    else:
        share = product(x, weights["head"])
    return lax.all_gather(share, ALL, axis=1, tiled=True, to="invarying")[:, : config.vocab_size]


def _embed(share, tokens):
    """Look up rows of the embedding, which is sharded by rows over all devices."""
    rows = share.shape[0]
    index = tokens - lax.axis_index(ALL) * rows
    mine = (index >= 0) & (index < rows)
    return lax.psum(jnp.where(mine[:, None], share[jnp.clip(index, 0, rows - 1)], 0), ALL)
