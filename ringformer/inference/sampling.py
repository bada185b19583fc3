"""Sample the next token of each row from its logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

NOT_FINITE = -1
"""Returned instead of a token where the largest logit of a row is not finite."""

HOTTEST = float(jnp.finfo(jnp.float32).max)


class Sampling(NamedTuple):
    """Sampling parameters. The draws of a row depend only on the seed, the row's index and its length."""

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Number of likeliest tokens to draw from (more where logits are equal)."""
    top_p: float | None = None
    """Probability mass to draw from: the fewest likeliest tokens that reach it."""
    seed: int = 0
    """Seed of the draws, 0 to 2^31 - 1."""

    def check(self) -> None:
        """Raise ValueError for invalid or contradictory values."""
        if not 0 <= self.temperature <= HOTTEST:  # nor NaN
            raise ValueError(
                f"temperature={self.temperature} must be 0, for the likeliest token, or positive and at most "
                f"{HOTTEST:.1e}, the maximum of float32"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or unset")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or unset")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^31)")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("temperature=0 takes the likeliest token and ignores top_k and top_p: set a temperature")

    @property
    def kind(self) -> "Kind":
        return Kind(self.temperature == 0, self.top_k is not None, self.top_p is not None)


class Kind(NamedTuple):
    """Part of a `Sampling` that decides which program is compiled; the numbers are inputs of the program."""

    greedy: bool = True
    has_top_k: bool = False
    has_top_p: bool = False


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
    tokens = logits.argmax(axis=-1) if kind.greedy else _draw(logits, likeliest, keys, temperature, top_k, top_p, kind)
    return jnp.where(jnp.isfinite(likeliest[:, 0]), tokens, NOT_FINITE).astype(jnp.int32)


def _draw(logits, likeliest, keys, temperature, top_k, top_p, kind):
    below = logits - likeliest
    logits = jnp.where(below == 0, 0.0, below / temperature)  # finite for the likeliest, however small the temperature
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
    return jax.vmap(jax.random.categorical)(keys, logits)


def row_keys(seed: Int32[Array, ""], rows: Int32[Array, " B"], lengths: Int32[Array, " B"]) -> jax.Array:
    """Derive a key for the next token of each row."""
    key = jax.random.key(seed)
    return jax.vmap(lambda row, length: jax.random.fold_in(jax.random.fold_in(key, row), length))(rows, lengths)
