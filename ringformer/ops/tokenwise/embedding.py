"""Token embedding whose gradient sums repeated tokens in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.tokenwise.scan_tokens import scan_tokens
from ringformer.ops.varying_axes import vary, vary_like, varying_axes

CHUNK = 8192
"""Tokens of all sequences per chunk: their gradients are converted to float32 and sorted by the compiler's scatter
together. Each chunk reads and writes the gradient of the whole table."""


def embed(table: Float[Array, "V D"], tokens: Int[AnyArray, "B T"]) -> Float[Array, "B T D"]:
    """Look up the rows of `table` at `tokens`, which lie in [0, V). Differentiable in the table."""
    return _embed(*reverse_mode_only(vary((table, tokens), varying_axes(table, tokens)), "embed"))


@jax.custom_vjp
def _embed(table, tokens):
    return table[tokens]


def _forward(table, tokens):
    return table[tokens], (table, tokens)


def _backward(residuals, dx):
    table, tokens = residuals

    def add_chunk(total, chunk):
        tokens, dx = chunk
        return total.at[tokens].add(dx.astype(jnp.float32)), None

    # The zeros wait for dx: XLA would else make them first, and keep them while the layers before are differentiated.
    zero, dx = lax.optimization_barrier((jnp.float32(0), dx))
    total = vary_like(jnp.broadcast_to(zero, table.shape), table)
    of_each_sequence = max(1, CHUNK // len(tokens))
    return scan_tokens(add_chunk, total, (tokens, dx), of_each_sequence)[0].astype(table.dtype), None


_embed.defvjp(_forward, _backward)
