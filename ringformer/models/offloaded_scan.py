"""A scan over layers that offloads the arrays kept for the backward to host memory.

    forward    layer i    | arrays that it keeps are sent to the host
    backward   layer i    | arrays that layer i-1 kept arrive from the host

A custom backward overlaps each transfer with the work of a whole layer. The transpose of a `lax.scan` would instead
fetch a layer's arrays at the start of the layer's own iteration, when no work can hide the transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Argument:
    """Placeholder among the arrays that a layer keeps. It stands for the argument with this index, which the backward
    gets anyway."""

    index: int


def offloaded_scan(
    layer: Callable[..., Any], x: jax.Array, layers: Any, shared: Any, *, ahead: bool = True
) -> jax.Array:
    """Scan `x = layer(x, weights, shared)` over the rows of `layers` and return the last x.

    Supports reverse mode only. Float arrays that `jax.vjp` of a layer keeps, including its input, stay in host memory
    until its backward; weights, `shared` and work lists are not moved. On a CPU there is no other memory.

    Args:
      layer: differentiable in x and the weights, with any rematerialisation applied.
      layers: arrays with a leading dimension for the layers.
      shared: arrays for all layers, which get no gradient.
      ahead: fetch a layer's arrays one layer ahead; False: at its own backward, which saves the device memory of one
        layer's kept arrays.
    """

    @jax.custom_vjp
    def scan(x, layers, shared):
        return lax.scan(lambda x, weights: (layer(x, weights, shared), None), x, layers)[0]

    def forward(x, layers, shared):
        def turn(carry, weights):
            x, shared = carry
            y, vjp = jax.vjp(layer, x, weights, shared)
            return (y, shared), _offloaded(vjp, (weights, shared))

        (y, _), kept = lax.scan(turn, (x, shared), layers)
        return y, (kept, layers, shared)

    def backward(residuals, dy):
        kept, layers, shared = residuals
        count = len(jax.tree.leaves(layers)[0])

        def fetch(i):
            return jax.tree.map(lambda row: jax.device_put(_row(row, i), jax.memory.Space.Device), kept)

        def turn(carry, row):
            dy, here = carry
            i, weights = row
            following = None
            if ahead:
                following = fetch(jnp.maximum(i - 1, 0))
            else:
                here = fetch(i)
            dx, dweights, _ = _whole(here, (weights, shared))(dy)
            return (dx, following), dweights

        first = fetch(count - 1) if ahead else None
        (dx, _), dlayers = lax.scan(turn, (dy, first), (jnp.arange(count), layers), reverse=True)
        return dx, dlayers, None

    scan.defvjp(forward, backward)
    return scan(x, layers, shared)


def _row(stacked: jax.Array, i) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, i, keepdims=False)


def _offloaded(vjp: Any, arguments: Any) -> Any:
    """Move the float arrays that a vjp keeps to host memory, and replace kept arguments by placeholders."""
    places = {id(argument): _Argument(i) for i, argument in enumerate(jax.tree.leaves(arguments))}

    def place(kept):
        if id(kept) in places:
            return places[id(kept)]
        return jax.device_put(kept, jax.memory.Space.Host) if jnp.issubdtype(kept.dtype, jnp.floating) else kept

    return jax.tree.map(place, vjp)


def _whole(vjp: Any, arguments: Any) -> Any:
    """Invert `_offloaded`: put the arguments back in place of the placeholders."""
    given = jax.tree.leaves(arguments)

    def place(kept):
        return given[kept.index] if isinstance(kept, _Argument) else kept

    return jax.tree.map(place, vjp, is_leaf=lambda kept: isinstance(kept, _Argument))
