"""Draws of the next token of each row from its logits, on a device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ringformer.inference.sampling import Kind

NOT_FINITE = -1
"""Value that is returned instead of a token if the largest logit of a row is not finite."""


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
