"""Decode step on one device: it runs one token of each row through a decoder with sharded weights and cache, and
samples the next.

The residual stream is replicated over (tp, fsdp, sp). A layer communicates the columns of q, k and v (one all-gather
over fsdp and sp), the maximum and sum of the attention (over sp), and the partial sums after wo and the feed-forward.
It never moves a weight, nor anything that grows with the context.
"""

from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ringformer.inference.cache.arrays import Cache, layer_cache
from ringformer.inference.cache.token_attention import attend_token
from ringformer.inference.sampling import Kind
from ringformer.inference.weight_shares import ALL, REST
from ringformer.inference.words import product
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.decoder_layers import placements, with_parts
from ringformer.models.layer_kinds import LayerKind, scan_periods
from ringformer.models.own_attention import REGISTERED
from ringformer.models.rms_norm import rms_norm
from ringformer.ops.tokenwise.blockwise_feedforward import ACTIVATIONS

NOT_FINITE = -1
"""Value that is returned instead of a token if the largest logit of a row is not finite."""


def decode_hidden(
    config: DecoderConfig,
    weights: dict,
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
    parts = c.PARTS
    norm = partial(rms_norm, eps=c.norm_eps, offset=parts.norm_offset)
    query = positions[:, None]
    key = cache.positions[:, :slots]
    own = REGISTERED.get(c.attention)
    valid = {}
    for window in c.windows:
        if own and own.visible:
            valid[window] = (key >= 0) & own.visible(query, key, window or None)
        else:
            valid[window] = (key >= 0) & (key > query - window) if window else key >= 0
    tp = lax.axis_size("tp")
    sizes = [n * c.head_dim for n in (c.num_heads // tp, *[max(1, c.num_kv_heads // tp)] * 2)]

    def layer(kind: LayerKind, x, given):
        i, w = given
        attention = w["attention"]
        ffn = w["feedforward"]
        with jax.named_scope("attention"):
            h = x if parts.norms == "after" else norm(x, w["attention_norm"]["scale"])
            q, k, v = _projections(h, [attention[name] for name in ("wq", "wk", "wv")], sizes)
            q, k, v = (rearrange(y, "b (h d) -> b 1 h d", d=c.head_dim) for y in (q, k, v))
            biases, norms = (
                [attention[name] for name in names if name in attention]
                for names in (("bq", "bk", "bv"), ("q_norm", "k_norm"))
            )
            q, k, v = with_parts(c, q, k, v, biases, norms, "tp")
            q, k = placed[c.ropes.index(kind.rope)](q, k)
            heads = rearrange(q, "b 1 (k g) d -> b k g d", k=k.shape[2])
            caches = [layer_cache(cache, i, slots)._replace(valid=valid[kind.window])]
            if prefix is not None:
                caches.append(layer_cache(prefix, i, prefix.positions.shape[1]))
            o = attend_token(heads, k[:, 0], v[:, 0], caches, "sp", c.logit_scale)
            y = _reduced(rearrange(o, "b k g d -> b (k g d)").astype(x.dtype), attention["wo"])
            x = x + (y if parts.norms == "before" else norm(y, w["attention_output_norm"]["scale"]))
        with jax.named_scope("feed_forward"):
            h = x if parts.norms == "after" else norm(x, w["feedforward_norm"]["scale"])
            gate, up = (product(h, ffn[name]).astype(h.dtype) for name in ("w_gate", "w_up"))
            y = _sum(ACTIVATIONS[parts.activation](gate) * up, ffn["w_down"])
            x = x + (y if parts.norms == "before" else norm(y, w["feedforward_output_norm"]["scale"]))
        return x, (k, v)

    if unroll:
        rows = []
        for i, kind in enumerate(c.layer_kinds):
            x, row = layer(kind, x, (i, jax.tree.map(itemgetter(i), weights["layers"])))
            rows.append(row)
        k, v = (jnp.stack(x) for x in zip(*rows, strict=True))
        return norm(x, weights["norm"]["scale"]), k, v

    def of_layer(kind: LayerKind, x, i):
        row = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), weights["layers"])
        return layer(kind, x, (i, row))

    def run(kind: LayerKind, x, rows, _):
        return lax.scan(partial(layer if equal else of_layer, kind), x, rows)

    numbers = jnp.arange(c.num_layers, dtype=jnp.int32)
    equal = len(set(c.layer_kinds)) == 1
    # A part of the layers would be a copy of their weights: layers of several kinds are read by number.
    x, (k, v) = scan_periods(c.periods, run, x, (numbers, weights["layers"]) if equal else numbers)
    return norm(x, weights["norm"]["scale"]), k, v


def next_logits(config: DecoderConfig, weights: dict, x: Float[Array, "B D"]) -> Float32[Array, "B V"]:
    """Compute the logits of the next token of each row, on every device, from normed hidden states."""
    tied = config.tie_embeddings
    if tied:
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


def _projections(x, shares, sizes):
    """Multiply x by each matrix, and return the columns of the tp rank; one all-gather collects the devices'
    columns."""
    products = [product(x, w).astype(x.dtype) for w in shares]
    widths = [y.shape[-1] for y in products]
    columns = jnp.concatenate(products, axis=-1)
    gathered = lax.all_gather(columns, REST, axis=1, to="invarying")  # [B, devices, columns]
    parts = jnp.split(gathered, np.cumsum(widths)[:-1], axis=-1)
    return [rearrange(y, "b n c -> b (n c)")[:, :size] for y, size in zip(parts, sizes, strict=True)]


def _reduced(x, share):
    """Multiply x [B, rows] by a matrix that is sharded by rows."""
    rows = share.shape[0]
    x = jnp.pad(x, ((0, 0), (0, rows * lax.axis_size(REST) - x.shape[1])))
    return _sum(lax.dynamic_slice_in_dim(x, lax.axis_index(REST) * rows, rows, axis=1), share)


def _sum(x, share):
    """Multiply each device's part of x [B, rows] by its part of a matrix; sum the products over devices in float32."""
    return lax.psum(product(x, share), ALL).astype(x.dtype)


def sample(
    logits: Float32[Array, "B V"],
    keys: jax.Array,
    temperature: Float32[Array, ""],
    top_k: Int32[Array, ""],
    top_p: Float32[Array, ""],
    kind: Kind,
) -> Int32[Array, " B"]:
    """Draw a token of each row with the row's key, or return `NOT_FINITE`. The temperature applies first, then top-k,
    then top-p."""
    likeliest = logits.max(axis=-1, keepdims=True)  # NaN if any logit is
    finite = jnp.isfinite(likeliest[:, 0])
    if kind.greedy:
        return jnp.where(finite, logits.argmax(axis=-1), NOT_FINITE).astype(jnp.int32)
    below = logits - likeliest
    logits = jnp.where(below == 0, 0.0, below / temperature)  # finite for the likeliest at any temperature
    if kind.has_top_k or kind.has_top_p:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        kept = jnp.ones(ranked.shape, bool)
        if kind.has_top_k:
            kept &= jnp.arange(ranked.shape[-1]) < top_k
        if kind.has_top_p:
            p = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
            kept &= jnp.cumsum(p, axis=-1) - p < top_p
            kept = kept.at[:, 0].set(True)  # even if top_p rounds to 0 in float32
        least = jnp.where(kept, ranked, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    tokens = jax.vmap(jax.random.categorical)(keys, logits)
    return jnp.where(finite, tokens, NOT_FINITE).astype(jnp.int32)


def row_keys(seed: Int32[Array, ""], rows: Int32[Array, " B"], lengths: Int32[Array, " B"]) -> jax.Array:
    """Derive a key for the next token of each row."""
    key = jax.random.key(seed)
    return jax.vmap(lambda row, length: jax.random.fold_in(jax.random.fold_in(key, row), length))(rows, lengths)
