"""Scan over equal layers, with rematerialisation, optional groups of layers, and kept arrays on the device or
offloaded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from ringformer.models.config_checks import Remat
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.layer_kinds import LayerKind, scan_periods
from ringformer.models.offloaded_scan import FirstLayers, offloaded_scan
from ringformer.ops.host_stand_in import device_stand_ins
from ringformer.ops.ring_vjp import SAVED_OUTPUT, SAVED_SOFTMAX
from ringformer.ops.simulated_devices import after
from ringformer.ops.tokenwise.blockwise_feedforward import SAVED_HIDDEN

SAVED_FEEDFORWARD = "feedforward_output"
"""`checkpoint_name` of the feed-forward's output, in families that normalise it."""

_policies = jax.checkpoint_policies
_OUTPUTS = SAVED_OUTPUT, SAVED_SOFTMAX, SAVED_FEEDFORWARD
_PRODUCTS = _policies.save_only_these_names(*_OUTPUTS, SAVED_HIDDEN)
REMAT: dict[Remat, Callable[..., Any]] = {
    "full": _policies.nothing_saveable,
    "attention": _policies.save_only_these_names(*_OUTPUTS),
    "feedforward": _PRODUCTS,
    "dots": _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, _PRODUCTS),
    "none": _policies.everything_saveable,
}
"""Policies that decide what a layer keeps for its backward, each more than the one before: its input; o and the
softmax's m and l, so that the ring runs forward only once, and a feed-forward's output that a norm reads; the
feed-forward's hidden products; the outputs of all other products; everything."""


def scan_layers(
    layer: Callable[..., Any], c: DecoderConfig, x: jax.Array, layers: Any, shared: Any
) -> tuple[jax.Array, Any]:
    """Scan `x, kept = layer(kind, x, weights, shared)` over the rows of `layers`; return the last x and the stacked
    `kept`, None if layers are grouped or offloaded.

    Args:
      c: its remat, remat_group, full_remat_layers, offload and fetch_ahead decide which arrays are kept for the
        backward, and where. If periods of layers repeat, arrays are offloaded by the period.
      layers: arrays with a leading dimension for the layers.
      shared: arrays for all layers, which get no gradient.
    """
    offload = partial(offloaded_scan, ahead=c.fetch_ahead) if c.offload else None

    def run(kind: LayerKind, x, rows, repeated: bool):
        return _run(partial(layer, kind), c, None if repeated else offload, x, rows, shared)

    def scan(of_period: Callable[..., Any], x, rows):
        def period(x, rows):
            return of_period(x, device_stand_ins(rows, x))

        if offload is None:
            return lax.scan(period, x, rows)
        return offload(lambda x, rows, _: period(x, rows)[0], x, rows, shared), None

    return scan_periods(c.periods, run, x, layers, scan)


def _run(layer: Callable[..., Any], c: DecoderConfig, offload: Callable[..., Any] | None, x, layers, shared):
    """Scan over equal layers, of which groups of `remat_group` are recomputed together."""
    if c.full_remat_layers:
        assert offload is not None, "checked by the config"
        first = FirstLayers(c.full_remat_layers, _output_of(_rematerialised(layer, "full")))
        others = _output_of(_rematerialised(layer, c.remat))
        return offload(others, x, layers, shared, first=first), None
    g = c.remat_group
    kept = None
    count = len(jax.tree.leaves(layers)[0])
    grouped = count // g * g if g > 1 else 0
    if grouped:
        groups = jax.tree.map(lambda w: w[:grouped].reshape(-1, g, *w.shape[1:]), layers)
        x, _ = _scan(partial(_scan, layer, c.remat, None), "full", offload, x, groups, shared)
    if grouped < count:
        x, kept = _scan(layer, c.remat, offload, x, jax.tree.map(lambda w: w[grouped:], layers), shared)
    return x, None if grouped else kept


def _scan(layer: Callable[..., Any], remat: Remat, offload: Callable[..., Any] | None, x, layers, shared):
    layer = _rematerialised(layer, remat)
    if offload is not None:
        return offload(_output_of(layer), x, layers, shared), None
    return lax.scan(lambda x, weights: layer(x, weights, shared), x, layers)


def _rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    in_order = _begun_in_order(_with_stand_ins(layer))
    return _recomputed_in_order(jax.checkpoint(in_order, policy=REMAT[remat], prevent_cse=False))


def _output_of(layer: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return the layer without what it kept."""
    return lambda *arguments: layer(*arguments)[0]


def _with_stand_ins(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of `layer(x, weights, shared)` send gradients of weights in host memory there. A group of layers
    does so as one: a compiler cannot put together gradients of its layers in host memory."""

    def with_stand_ins(x, weights, shared):
        return layer(x, device_stand_ins(weights, x), shared)

    return with_stand_ins


def _begun_in_order(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let `layer(x, weights, shared)` read `shared` after x has arrived.

    Segment ids travel around the ring and depend on no layer. On simulated devices, the ids of a layer could therefore
    travel at the same time as the ring of the layers before it (`ops/simulated_devices.py`).
    """

    def in_order(x, weights, shared):
        return layer(x, weights, after(shared, x))

    return in_order


def _recomputed_in_order(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of `layer(x, weights, shared)` begin after its cotangent has arrived.

    What a layer recomputes depends on what it kept, and not on the layers behind it. On simulated devices, its ring
    could therefore run at the same time as the backward ring of another layer (`ops/simulated_devices.py`).
    """

    @jax.custom_vjp
    def in_order(x, weights, shared):
        return layer(x, weights, shared)

    def forward(x, weights, shared):
        y, vjp = jax.vjp(lambda x, weights: layer(x, weights, shared), x, weights)
        return y, vjp

    def backward(vjp, cotangent):
        dx, dweights = after(vjp, jax.tree.leaves(cotangent)[0])(cotangent)
        return dx, dweights, None

    in_order.defvjp(forward, backward)
    return in_order
