"""Feed-forward computed block by block along the local sequence (Blockwise Parallel Transformer, section 3).

The [T, F] hidden activation never exists: the forward holds one chunk of it at a time; the backward recomputes each
chunk from its input and sums the weights' gradients in float32 for any compute dtype. Where memory is to spare, the
backward gets the hidden activation instead: two of its products are then not computed again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.tokenwise.layer_weight import (
    join_weights,
    product,
    split_weights,
    with_stand_ins,
    without_stand_ins,
)
from ringformer.ops.tokenwise.scan_tokens import scan_tokens
from ringformer.ops.varying_axes import vary, vary_like, varying_axes

ACTIVATIONS: dict[str, Callable[..., Any]] = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}
SAVED_HIDDEN = "feedforward_hidden"
"""`checkpoint_name` of the hidden products; a remat policy that saves them avoids computing them again."""


def gated(
    weights: tuple[Any, Any, Any], x: Float[Array, "B T D"], activation: Callable[..., Any] = jax.nn.silu
) -> Float[Array, "B T D"]:
    """Compute `(activation(x w_gate) * (x w_up)) w_down`: SwiGLU, or GeGLU (Shazeer, GLU variants).

    Args:
      weights: w_gate [D, F], w_up [D, F] and w_down [F, D], each an array or a `LayerWeight`.
    """
    return gated_output(weights, gated_hidden(weights, x), activation)


def gated_hidden(weights: tuple[Any, Any, Any], x: Float[Array, "B T D"]) -> tuple[jax.Array, jax.Array]:
    """Compute the two products `x w_gate` and `x w_up` [B, T, F] of `gated`."""
    w_gate, w_up, _ = weights
    return product(x, w_gate), product(x, w_up)


def gated_output(
    weights: tuple[Any, Any, Any], hidden: tuple[jax.Array, jax.Array], activation: Callable[..., Any] = jax.nn.silu
) -> Float[Array, "B T D"]:
    """Compute `gated` from the products of `gated_hidden`."""
    gate, up = hidden
    return product(activation(gate) * up, weights[2])


def blockwise_feedforward(
    function: Callable[..., Any],
    weights: PyTree[Float[Array, "..."]],
    x: Float[Array, "B T ..."],
    chunk: int,
    *,
    hidden: Callable[..., Any] | None = None,
) -> Float[Array, "B T ..."]:
    """Compute `function(weights, x)`, which must act on each token separately, `chunk` tokens of x at a time.

    The last chunk may be shorter. Differentiable in weights and x by reverse mode, and by forward mode over reverse. Of
    a `LayerWeight` among the weights, w gets no gradient.

    Args:
      hidden: first part of the computation, whose results [B, T, ...] are kept for the backward under the name
        `SAVED_HIDDEN`: `function(weights, hidden(weights, x))` is computed. None: the backward recomputes all.
    """
    axes = varying_axes(weights, x)
    weights, x = reverse_mode_only(vary((weights, x), axes), "blockwise_feedforward")
    return _blockwise(function, hidden, chunk, *split_weights(weights), x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _blockwise(function, hidden, chunk, trained, frozen, x):
    weights = join_weights(trained, frozen)

    def compute_chunk(_, x):
        kept = x if hidden is None else hidden(weights, x)
        return None, function(weights, kept)

    return scan_tokens(compute_chunk, None, x, chunk)[1]


def _forward(function, hidden, chunk, trained, frozen, x):
    if hidden is None:
        return _blockwise(function, hidden, chunk, trained, frozen, x), (without_stand_ins(trained), frozen, x, x)
    weights = join_weights(trained, frozen)

    def compute_chunk(_, x):
        kept = hidden(weights, x)
        return None, (function(weights, kept), kept)

    _, (y, kept) = scan_tokens(compute_chunk, None, x, chunk)
    return y, (without_stand_ins(trained), frozen, x, checkpoint_name(kept, SAVED_HIDDEN))


def _backward(function, hidden, chunk, residuals, dy):
    trained, frozen, x, kept = residuals
    trained = with_stand_ins(trained, frozen)
    add = partial(jax.tree.map, lambda t, d: t + d.astype(jnp.float32))

    def add_chunk(total, tokens):
        x, kept, dy = tokens
        dweights, dx = jax.vjp(lambda w, kept: function(join_weights(w, frozen), kept), trained, kept)[1](dy)
        total = add(total, dweights)
        if hidden is not None:
            dweights, dx = jax.vjp(lambda w, x: hidden(join_weights(w, frozen), x), trained, x)[1](dx)
            total = add(total, dweights)
        return total, dx

    total = jax.tree.map(lambda w: vary_like(jnp.zeros(w.shape, jnp.float32), w), trained)
    total, dx = scan_tokens(add_chunk, total, (x, kept, dy), chunk)
    return jax.tree.map(lambda w, t: t.astype(w.dtype), trained, total), None, dx


_blockwise.defvjp(_forward, _backward)
