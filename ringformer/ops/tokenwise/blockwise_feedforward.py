"""Feed-forward computed block by block along the local sequence (Blockwise Parallel Transformer, section 3).

The [T, F] hidden activation never exists: the forward holds one chunk of it at a time; the backward recomputes each
chunk from its input and sums the weights' gradients in float32 for any compute dtype.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.tokenwise.scan_tokens import scan_tokens
from ringformer.ops.varying_axes import vary, vary_like, varying_axes

ACTIVATIONS: dict[str, Callable[..., Any]] = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def gated(
    weights: tuple[Float[Array, "D F"], Float[Array, "D F"], Float[Array, "F D"]],
    x: Float[Array, "B T D"],
    activation: Callable[..., Any] = jax.nn.silu,
) -> Float[Array, "B T D"]:
    """Compute `(activation(x w_gate) * (x w_up)) w_down` for (w_gate, w_up, w_down): SwiGLU, or GeGLU (Shazeer, GLU
    variants)."""
    w_gate, w_up, w_down = weights
    return (activation(x @ w_gate) * (x @ w_up)) @ w_down


def blockwise_feedforward(
    function: Callable[..., Any], weights: PyTree[Float[Array, "..."]], x: Float[Array, "B T ..."], chunk: int
) -> Float[Array, "B T ..."]:
    """Compute `function(weights, x)`, which must act on each token separately, `chunk` tokens of x at a time.

    The last chunk may be shorter. Differentiable in weights and x by reverse mode, and by forward mode over reverse.
    """
    axes = varying_axes(weights, x)
    weights, x = reverse_mode_only(vary((weights, x), axes), "blockwise_feedforward")
    return _blockwise(function, chunk, weights, x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(function, chunk, weights, x):
    return scan_tokens(lambda _, x: (None, function(weights, x)), None, x, chunk)[1]


def _forward(function, chunk, weights, x):
    return _blockwise(function, chunk, weights, x), (weights, x)


def _backward(function, chunk, residuals, dy):
    weights, x = residuals

    def add_chunk(total, tokens):
        x, dy = tokens
        dweights, dx = jax.vjp(function, weights, x)[1](dy)
        return jax.tree.map(lambda t, d: t + d.astype(jnp.float32), total, dweights), dx

    total = jax.tree.map(lambda w: vary_like(jnp.zeros(w.shape, jnp.float32), w), weights)
    total, dx = scan_tokens(add_chunk, total, (x, dy), chunk)
    return jax.tree.map(lambda w, t: t.astype(w.dtype), weights, total), dx


_blockwise.defvjp(_forward, _backward)
