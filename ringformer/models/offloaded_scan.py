"""A scan over layers that offloads the arrays kept for the backward to host memory.

    forward    layer i    | arrays that it keeps are sent to the host
    backward   layer i    | arrays that layer i-1 kept arrive from the host

A custom backward overlaps each transfer with the work of a whole layer. The transpose of a `lax.scan` would instead
fetch a layer's arrays at the start of the layer's own iteration, when no work can hide the transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.varying_axes import vary_like


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Argument:
    """Placeholder among the arrays that a layer keeps. It stands for the argument with this index, which the backward
    gets anyway."""

    index: int


class FirstLayers(NamedTuple):
    """Layers at the beginning that keep other arrays than those behind them."""

    number: int
    layer: Callable[..., Any]
    """The same function, with another rematerialisation."""


class _Run(NamedTuple):
    """Layers with the same rematerialisation."""

    layer: Callable[..., Any]
    start: int
    stop: int

    def rows(self, layers: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return what a scan over the run's rows of `layers` runs over, and a function that returns a row's weights.
        The scan over a part of them reads rows of the whole: slices would be a second copy of the weights."""
        if self.stop - self.start == _count(layers):
            return layers, lambda weights: weights
        return jnp.arange(self.start, self.stop), lambda i: jax.tree.map(lambda w: _row(w, i), layers)


def offloaded_scan(
    layer: Callable[..., Any],
    x: jax.Array,
    layers: Any,
    shared: Any,
    *,
    first: FirstLayers | None = None,
    ahead: bool = True,
) -> jax.Array:
    """Scan `x = layer(x, weights, shared)` over the rows of `layers` and return the last x.

    Supports reverse mode only. Float arrays that `jax.vjp` of a layer keeps, including its input, stay in host memory
    until its backward; weights, `shared` and work lists are not moved. On a CPU there is no other memory.

    Args:
      layer: differentiable in x and the weights, with any rematerialisation applied.
      layers: arrays with a leading dimension for the layers.
      shared: arrays for all layers, which get no gradient.
      first: the first layers, if their rematerialisation is another one.
      ahead: fetch a layer's arrays one layer ahead; False: at its own backward, which saves the device memory of one
        layer's kept arrays.
    """

    runs = [_Run(layer, 0, _count(layers))]
    if first is not None:
        runs = [_Run(first.layer, 0, first.number), _Run(layer, first.number, _count(layers))]

    @jax.custom_vjp
    def scan(x, layers, shared):
        for run in runs:
            rows, weights_of = run.rows(layers)
            x, _ = lax.scan(lambda x, row: (run.layer(x, weights_of(row), shared), None), x, rows)  # noqa: B023
        return x

    def forward(x, layers, shared):
        kept: list[Any] = []
        for run in runs:
            (x, _), of_run = forward_of(run, x, layers, shared)
            kept = [*kept, of_run]
        return x, (kept, layers, shared)

    def forward_of(run, x, layers, shared):
        rows, weights_of = run.rows(layers)

        def turn(carry, row):
            x, shared = carry
            weights = weights_of(row)
            y, vjp = jax.vjp(run.layer, x, weights, shared)
            return (y, shared), _offloaded(vjp, (weights, shared))

        return lax.scan(turn, (x, shared), rows)

    def backward(residuals, dy):
        kept, layers, shared = residuals
        if first is None:
            dx, dlayers = backward_of(runs[0], kept[0], layers, shared, dy)
            return dx, dlayers, None
        # Both runs write into one array: parts of it would have to be joined, which takes twice their memory.
        dlayers = jax.tree.map(lambda w: vary_like(jnp.zeros(w.shape, w.dtype), w), layers)
        for run, of_run in zip(reversed(runs), reversed(kept), strict=True):
            dy, dlayers = backward_of(run, of_run, layers, shared, dy, dlayers)
        return dy, dlayers, None

    def backward_of(run, kept, layers, shared, dy, into=None):
        count = run.stop - run.start
        rows, weights_of = run.rows(layers)

        def fetch(i):
            return jax.tree.map(lambda row: jax.device_put(_row(row, i), jax.memory.Space.Device), kept)

        def turn(carry, place):
            dy, here, into = carry
            i, row = place
            following = None
            if ahead:
                following = fetch(jnp.maximum(i - 1, 0))
            else:
                here = fetch(i)
            dx, dweights, _ = _whole(here, (weights_of(row), shared))(dy)
            if into is None:
                return (dx, following, None), dweights
            into = jax.tree.map(lambda g, of_row: lax.dynamic_update_index_in_dim(g, of_row, row, 0), into, dweights)
            return (dx, following, into), None

        last = fetch(count - 1) if ahead else None
        (dx, _, into), dlayers = lax.scan(turn, (dy, last, into), (jnp.arange(count), rows), reverse=True)
        return dx, dlayers if into is None else into

    scan.defvjp(forward, backward)
    return scan(x, layers, shared)


def _count(layers: Any) -> int:
    return len(jax.tree.leaves(layers)[0])


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
