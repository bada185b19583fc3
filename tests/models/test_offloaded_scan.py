"""Layers whose kept arrays wait in host memory: gradients of a plain scan, and what travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ringformer.models.offloaded_scan import FirstLayers, offloaded_scan
from tests.helpers import normal, random_vjp, relative_error

LAYERS, ROWS, WIDTH = 5, 3, 8
KEEP = jax.checkpoint_policies.save_only_these_names("kept")


def layer(x, weights, shared):
    """Keeps its input and a name; `shared` has floats and integers, as rotations and segment ids are."""
    scale, picked = shared
    h = checkpoint_name(jnp.tanh(x @ weights["w"]) * scale, "kept")
    return x + h[:, picked] @ weights["v"]


REMATERIALISED = jax.checkpoint(layer, policy=KEEP, prevent_cse=False)
FULLY = jax.checkpoint(layer, prevent_cse=False)


def inputs():
    x, w, v = normal(0, ROWS, WIDTH), *(normal(seed, LAYERS, WIDTH, WIDTH) / WIDTH**0.5 for seed in (1, 2))
    shared = 1 + 0.1 * normal(3, WIDTH), np.random.default_rng(4).permutation(WIDTH)
    return x, {"w": w, "v": v}, jax.tree.map(jnp.asarray, shared)


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("ahead", [True, False])
def test_gradients_are_those_of_a_plain_scan(ahead, first):
    """Of every layer, the first and the last too; at one layer as well."""
    x, layers, shared = inputs()
    first_layers = FirstLayers(first, FULLY) if first else None

    def plain(x, layers):
        return lax.scan(lambda x, weights: (layer(x, weights, shared), None), x, layers)[0]

    def offloaded(x, layers):
        return offloaded_scan(REMATERIALISED, x, layers, shared, ahead=ahead, first=first_layers)

    for count in (LAYERS,) if first else (LAYERS, 1):
        some = jax.tree.map(lambda w: w[:count], layers)  # noqa: B023
        y, dx, dlayers = random_vjp(jax.jit(offloaded), x, some)
        expected_y, expected_dx, expected = random_vjp(plain, x, some)
        assert relative_error(y, expected_y) < 1e-6 and relative_error(dx, expected_dx) < 1e-5
        for name, gradient in dlayers.items():
            for row in range(count):  # a scan that fetches another layer's input is wrong in some layers alone
                assert relative_error(gradient[row], expected[name][row]) < 1e-5


def test_what_waits_in_host_memory_is_what_the_layers_keep():
    """The input and the named array of each layer: neither weights, nor what the layers share, nor integers."""
    x, layers, shared = inputs()
    loss = jax.grad(lambda x, layers: offloaded_scan(REMATERIALISED, x, layers, shared).sum(), argnums=(0, 1))
    sent = [shape for shape, space in _moves(jax.make_jaxpr(loss)(x, layers).jaxpr) if space == jax.memory.Space.Host]
    assert sent == [(ROWS, WIDTH)] * 2


def test_the_first_layers_keep_only_their_input():
    """On the host, there are 2 inputs, and for the 3 layers behind them 3 inputs and 3 named arrays."""
    x, layers, shared = inputs()

    def loss(x, layers):
        return offloaded_scan(REMATERIALISED, x, layers, shared, first=FirstLayers(2, FULLY)).sum()

    _, vjp = jax.vjp(jax.jit(loss), x, layers)
    kept = [w.shape for w in jax.tree.leaves(vjp) if w.shape[-2:] == (ROWS, WIDTH)]
    assert sorted(kept) == [(2, ROWS, WIDTH), (3, ROWS, WIDTH), (3, ROWS, WIDTH)]


def _moves(jaxpr):
    """The shape and the memory of what every `device_put` of a program moves."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            yield from ((v.aval.shape, v.aval.memory_space) for v in equation.outvars)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _moves(inner)
