"""Decode step on one device: it runs one token of each row through a decoder with sharded weights and cache.

The residual stream is replicated over (tp, fsdp, sp). A layer communicates the columns of q, k and v (one all-gather
over fsdp and sp), the maximum and sum of the attention (over sp), and the partial sums after wo and the feed-forward.
It never moves a weight, nor anything that grows with the context.
"""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

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
from ringformer.models.placement import placements
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
    placed = placements(c, positions[:, None])
    valid = {window: visible_slots(c, window, positions, cache.positions[:, :slots]) for window in c.windows}
    model = nnx.merge(abstract_model(c)[0], weights)
    definition, state = nnx.split(model.layers)
    layers = nnx.to_pure_dict(state)

    def layer(kind: LayerKind, x, given):
        i, weights = given
        caches = [layer_cache(cache, i, slots)._replace(valid=valid[kind.window])]
        if prefix is not None:
            caches.append(layer_cache(prefix, i, prefix.positions.shape[1]))
        attend = partial(_attend, caches, c.logit_scale)
        return nnx.merge(definition, weights).decode(x, placed[c.ropes.index(kind.rope)], attend)

    def of_layer(kind: LayerKind, x, i):
        row = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), layers)
        return layer(kind, x, (i, row))

    if unroll:
        keys = []
        values = []
        for i, kind in enumerate(c.layer_kinds):
            x, (k, v) = layer(kind, x, (i, jax.tree.map(itemgetter(i), layers)))
            keys.append(k)
            values.append(v)
        k = jnp.stack(keys)
        v = jnp.stack(values)
    else:
        numbers = jnp.arange(c.num_layers, dtype=jnp.int32)
        equal = len(set(c.layer_kinds)) == 1
        # A part of the layers would be a copy of their weights: layers of several kinds are read by number.
        of_kind = layer if equal else of_layer
        rows = (numbers, layers) if equal else numbers
        x, (k, v) = scan_periods(c.periods, lambda kind, x, rows, _: lax.scan(partial(of_kind, kind), x, rows), x, rows)
    return rms_norm(x, weights["norm"]["scale"], c.norm_eps, c.PARTS.norm_offset), k, v


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
