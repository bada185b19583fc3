"""Rotary position embedding with phases exact at any position (Su et al., RoFormer).

A float32 angle `position * frequency` is off by 1 rad at 16M tokens. Here a phase is a fraction of a turn in
fixed point: a frequency is 64 bits, the product with a position wraps by itself, and its upper 32 bits, right to
one unit (2^-32 turns), are the phase. Neighbouring and relative phases are therefore as exact at 2^31 as at 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """float64 [d/2]: radians per position, theta^(-2i/d)."""
    return float(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def phases(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """uint32 [..., d/2]: the phase of each position in units of 2^-32 turns.

    Args:
      positions: int32 [...], not negative.
      frequencies: float64 [d/2], radians per position.
    """
    turns = frequencies / (2 * np.pi) % 1.0
    high = np.floor(turns * 2.0**32)
    low = np.floor((turns * 2.0**32 - high) * 2.0**32)
    p = positions.astype(jnp.uint32)[..., None]
    return p * jnp.asarray(high, jnp.uint32) + _multiply_high(p, jnp.asarray(low, jnp.uint32))


def rotations(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """`(cos, sin)`, float32 [..., d/2], of the phases."""
    # Read as signed, a phase is within half a turn of zero: float32 then resolves it to 2^-25 turns or better.
    signed = lax.bitcast_convert_type(phases(positions, frequencies), jnp.int32)
    angle = signed.astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + d/2) of x [B, T, H, d] by the angles of (cos, sin) [B, T, d/2] (Hugging Face order)."""
    cos, sin = (r[:, :, None, :] for r in rotation)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two uint32, from 16-bit halves."""
    mask = jnp.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> 16, a & mask, b >> 16, b & mask
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & mask)) >> 16)
