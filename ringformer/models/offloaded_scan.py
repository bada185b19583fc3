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

    def is_all(self, layers: Any) -> bool:
        return self.stop - self.start == _count(layers)

    def rows(self, layers: Any) -> Any:
        """Return what a scan over the run goes through: the weights, or the places of a part of them. Slices of the
        weights would be a second copy."""
        return layers if self.is_all(layers) else jnp.arange(self.start, self.stop)

    def weights(self, layers: Any, row: Any) -> Any:
        """Return the weights of a layer, given the run's row."""
        return row if self.is_all(layers) else jax.tree.map(lambda w: _row(w, row), layers)


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
            x = output_of(run, x, layers, shared)
        return x

    def output_of(run, x, layers, shared):
        def turn(x, row):
            return run.layer(x, run.weights(layers, row), shared), None

        return lax.scan(turn, x, run.rows(layers))[0]

    def forward(x, layers, shared):
        kept: list[Any] = []
        for run in runs:
            x, of_run = output_and_kept(run, x, layers, shared)
            kept.append(of_run)
        return x, (kept, layers, shared)

    def output_and_kept(run, x, layers, shared):
        def turn(carry, row):
            x, shared = carry
            weights = run.weights(layers, row)
            y, vjp = jax.vjp(run.layer, x, weights, shared)
            return (y, shared), _offloaded(vjp, (weights, shared))

        (x, _), kept = lax.scan(turn, (x, shared), run.rows(layers))
        return x, kept

    def backward(residuals, dy):
        kept, layers, shared = residuals
        if len(runs) == 1:
            (_, dx), dlayers = gradients_of(runs[0], kept[0], layers, shared, None, dy)
            return dx, dlayers, None
        # All runs write into one array: parts of it would have to be joined, which takes their memory twice.
        dlayers = jax.tree.map(lambda w: vary_like(jnp.zeros(w.shape, w.dtype), w), layers)
        for run, of_run in zip(reversed(runs), reversed(kept), strict=True):
            (dlayers, dy), _ = gradients_of(run, of_run, layers, shared, dlayers, dy)
        return dy, dlayers, None

    def gradients_of(run, kept, layers, shared, dlayers, dy):
        """Return (dlayers, dx), and the gradients of the run's weights if there is no `dlayers` to write them into."""
        count = run.stop - run.start

        def fetch(i):
            return jax.tree.map(lambda row: jax.device_put(_row(row, i), jax.memory.Space.Device), kept)

        def turn(carry, place):
            dlayers, dy, here = carry
            i, row = place
            following = None
            if ahead:
                following = fetch(jnp.maximum(i - 1, 0))
            else:
                here = fetch(i)
            dx, dweights, _ = _whole(here, (run.weights(layers, row), shared))(dy)
            if dlayers is None:
                return (None, dx, following), dweights
            return (_with_row(dlayers, dweights, row), dx, following), None

        last = fetch(count - 1) if ahead else None
        places = jnp.arange(count), run.rows(layers)
        (dlayers, dx, _), dweights = lax.scan(turn, (dlayers, dy, last), places, reverse=True)
        return (dlayers, dx), dweights

    scan.defvjp(forward, backward)
    return scan(x, layers, shared)


def _count(layers: Any) -> int:
    return len(jax.tree.leaves(layers)[0])


def _row(stacked: jax.Array, i) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, i, keepdims=False)


def _with_row(stacked: Any, row: Any, i) -> Any:
    """Return stacked arrays with another row, in place."""
    return jax.tree.map(lambda whole, of_row: lax.dynamic_update_index_in_dim(whole, of_row, i, 0), stacked, row)


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
