"""Token embedding whose table gradient is summed in float32, however often a token occurs."""

import jax
import jax.numpy as jnp

from ringformer.ops.vma import vary, vary_like, varying_axes


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] at int32 `tokens` [B, T] in [0, V): [B, T, D] in the table's dtype."""
    return _embed(*vary((table, tokens), varying_axes(table, tokens)))


@jax.custom_vjp
def _embed(table, tokens):
    return table[tokens]


def _forward(table, tokens):
    return table[tokens], (table, tokens)


def _backward(residuals, dx):
    table, tokens = residuals
    zero = vary_like(jnp.zeros(table.shape, jnp.float32), table)
    return zero.at[tokens].add(dx.astype(jnp.float32)).astype(table.dtype), None


_embed.defvjp(_forward, _backward)
