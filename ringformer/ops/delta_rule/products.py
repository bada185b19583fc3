"""Products in a dtype of choice, summed in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float32


def product(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> Float32[Array, "..."]:
    """Return `jnp.einsum(equation, a, b)` with a and b rounded to a dtype, and float32 sums."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    operands = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)
