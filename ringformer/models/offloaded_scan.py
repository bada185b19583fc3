"""A scan over layers whose kept arrays wait in host memory for their backward.

    forward    layer i    | what it keeps sets out for the host
    backward   layer i    | what layer i-1 kept arrives from the host

Each travels under the work of a whole layer, by a custom backward: transposing a `lax.scan` would fetch what a layer
kept at the top of its own turn, with nothing to travel under.
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
    """Stands, in what a layer keeps, for the argument with this index: its backward is given it again."""

    index: int


def offloaded_scan(layer: Callable, x: jax.Array, layers: Any, shared: Any, *, ahead: bool = True) -> jax.Array:
    """The last output of `x = layer(x, weights, shared)` for each row of `layers`.

    Reverse mode alone. The floats that `jax.vjp` of a layer keeps, its input among them, lie in host memory until its
    backward; weights, `shared` and lists of work stay where they are. A CPU has no other memory.

    Args:
      layer: differentiable in x and the weights, rematerialised as it should be.
      layers: arrays with a leading dimension for the layers.
      shared: arrays for all layers; no gradient is taken of them.
      ahead: fetch as drawn above; False: in a layer's own turn, which spares the device what one layer keeps.
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
            (dy, here), (i, weights) = carry, row
            here, following = (here, fetch(jnp.maximum(i - 1, 0))) if ahead else (fetch(i), None)
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
    """A vjp with what it keeps in host memory, and without those of the arguments that it keeps."""
    places = {id(argument): _Argument(i) for i, argument in enumerate(jax.tree.leaves(arguments))}

    def place(kept):
        if id(kept) in places:
            return places[id(kept)]
        return jax.device_put(kept, jax.memory.Space.Host) if jnp.issubdtype(kept.dtype, jnp.floating) else kept

    return jax.tree.map(place, vjp)


def _whole(vjp: Any, arguments: Any) -> Any:
    """The vjp that `_offloaded` took the arguments from, with them."""
    given = jax.tree.leaves(arguments)

    def place(kept):
        return given[kept.index] if isinstance(kept, _Argument) else kept

    return jax.tree.map(place, vjp, is_leaf=lambda kept: isinstance(kept, _Argument))
