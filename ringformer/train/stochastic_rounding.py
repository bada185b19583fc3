"""Stochastic rounding to bfloat16: up or down by chance, so that the mean is the number itself.

Rounding to nearest loses every change that is smaller than half of the last digit: a moment that decays by a thousandth
a step, or a weight that a small learning rate moves, then stands still. Chance comes from a hash of the number and the
step. So a resumed run rounds as the run did, on any mesh, in rows or as a whole, and no random state is kept. Equal
numbers are rounded alike, unless other numbers that go with them differ.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, UInt32

KEPT_BITS = 0xFFFF0000
"""Bits of a float32 that bfloat16 has, too."""


def rounding_key(step: jax.Array, purpose: int) -> UInt32[Array, ""]:
    """Return the key of a step's rounding; what a step rounds for another purpose has another key."""
    odd = jnp.uint32(0x9E3779B9)  # 2^32 over the golden ratio
    return _mixed(step.astype(jnp.uint32) * odd + jnp.uint32(purpose))


def round_stochastically(
    x: Float32[Array, "..."], key: UInt32[Array, ""], beside: Float32[Array, "..."] | None = None
) -> BFloat16[Array, "..."]:
    """Round to one of the two neighbours in bfloat16, each as likely as the number is near to it. What is not finite
    stays as it is.

    Args:
      beside: numbers that go with those of x: chance depends on both.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    hashed = bits ^ key
    if beside is not None:
        hashed ^= _mixed(lax.bitcast_convert_type(beside, jnp.uint32))
    chance = _mixed(hashed) & jnp.uint32(~KEPT_BITS & 0xFFFFFFFF)
    kept = (bits + chance) & jnp.uint32(KEPT_BITS)
    rounded = lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return a hash of each number, every bit of which depends on all bits of it (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
