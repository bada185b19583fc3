"""Products with a layer's weights: their gradients are float32, and a frozen weight has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.tokenwise.blockwise_feedforward import blockwise_feedforward, gated
from ringformer.ops.tokenwise.layer_weight import (
    LayerWeight,
    join_weights,
    of_inputs,
    of_outputs,
    product,
    split_weights,
)
from tests.helpers import normal, relative_error

B, T, D, H, d, r = 2, 40, 12, 3, 4, 2
SHAPES = {1: ((D,), (H, d)), 2: ((H, d), (D,)), 3: ((3, 1, d), (D,))}
"""Input and output features, by the number of input dimensions."""
EXACT = 1e-6
"""Relative error of float32; that of a bfloat16 is some 2e-3."""


def random(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(normal(seed, *shape), dtype)


def rounded(seed: int, *shape: int) -> jax.Array:
    return random(seed, *shape, dtype=jnp.bfloat16)


def wide(*arrays) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("inputs", SHAPES)
def test_gradients_of_trained_weights_are_not_rounded(inputs):
    ins, outs = SHAPES[inputs]
    x, w, dy = rounded(0, B, T, *ins), rounded(1, *ins, *outs), rounded(2, B, T, *outs)
    weight = LayerWeight(w, jnp.zeros(w.shape, jnp.float32))
    y, vjp = jax.vjp(lambda x, stand_in: product(x, weight._replace(stand_in=stand_in), inputs), x, weight.stand_in)
    dx, dw = vjp(dy)
    plain = jax.vjp(lambda x: product(x, w, inputs), x)
    np.testing.assert_array_equal(y, plain[0])
    np.testing.assert_array_equal(dx, plain[1](dy)[0])
    wide_x, wide_dy = wide(x, dy)
    assert dw.dtype == jnp.float32
    assert relative_error(dw, np.tensordot(wide_x, wide_dy, ((0, 1), (0, 1)))) <= EXACT


@pytest.mark.parametrize("inputs", SHAPES)
def test_factors_get_the_gradients_of_the_merged_weight(inputs):
    """dA = dW B^T and dB = A^T dW, in float64."""
    ins, outs = SHAPES[inputs]
    x, w, dy = random(0, B, T, *ins), random(1, *ins, *outs), random(2, B, T, *outs)
    a, b = random(3, *ins, r), random(4, r, *outs)

    def function(a, b):
        return product(x, LayerWeight(w, None, a, b), inputs)

    da, db = jax.vjp(function, a, b)[1](dy)
    wide_x, wide_dy, wide_a, wide_b = wide(x, dy, a, b)
    dw = np.tensordot(wide_x, wide_dy, ((0, 1), (0, 1)))
    axes = list(range(inputs, dw.ndim)), list(range(1, wide_b.ndim))
    assert relative_error(da, np.tensordot(dw, wide_b, axes)) <= EXACT
    axes = list(range(inputs)), list(range(inputs))
    assert relative_error(db, np.tensordot(wide_a, dw, axes)) <= EXACT


def test_chunks_sum_and_hand_on_float32():
    """Of a feed-forward in bfloat16, 40 chunks of one token. Plain arrays get bfloat16, and each chunk's is rounded."""
    F = 20
    x, dy = rounded(0, B, T, D), rounded(1, B, T, D)
    arrays = [rounded(2 + i, *shape) for i, shape in enumerate(((D, F), (D, F), (F, D)))]

    def chunked(*stand_ins):
        weights = tuple(LayerWeight(w, s) for w, s in zip(arrays, stand_ins, strict=True))
        return blockwise_feedforward(gated, weights, x, 1)

    zeros = [jnp.zeros(w.shape, jnp.float32) for w in arrays]
    found = jax.vjp(chunked, *zeros)[1](dy)
    plain = jax.vjp(lambda *w: blockwise_feedforward(gated, w, x, 1), *arrays)[1](dy)
    exact = jax.vjp(lambda *w: gated(w, x.astype(jnp.float32)), *(w.astype(jnp.float32) for w in arrays))[1]
    for actual, coarse, expected in zip(found, plain, exact(dy.astype(jnp.float32)), strict=True):
        assert actual.dtype == jnp.float32 and coarse.dtype == jnp.bfloat16
        assert relative_error(actual, expected) < relative_error(coarse, expected) < 1e-2


def test_stand_ins_are_not_kept_for_the_backward():
    """Their zeros would take the memory of a float32 model. The weights themselves are kept."""
    F = 20
    x = rounded(0, B, T, D)
    arrays = [rounded(2 + i, *shape) for i, shape in enumerate(((D, F), (D, F), (F, D)))]
    zeros = [jnp.zeros(w.shape, jnp.float32) for w in arrays]

    def whole(*stand_ins):
        return gated(tuple(map(LayerWeight, arrays, stand_ins)), x)

    def chunked(*stand_ins):
        return blockwise_feedforward(gated, tuple(map(LayerWeight, arrays, stand_ins)), x, 7)

    for function in (whole, chunked):
        kept = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(jax.vjp(function, *zeros)[1])]
        assert all((w.shape, jnp.float32) not in kept for w in arrays)
        assert ((F, D), jnp.bfloat16) in kept


def test_a_frozen_weight_has_no_gradient():
    """In the program there is one product more for the activations, and none for the weight."""
    x, w = random(0, B, T, D), random(1, D, H, d)
    program = str(jax.make_jaxpr(jax.grad(lambda x: product(x, LayerWeight(w)).sum()))(x))
    assert program.count("dot_general") == 2
    trained = jax.make_jaxpr(jax.grad(lambda w: product(x, w).sum() ** 2))(w)
    assert str(trained).count("dot_general") == 2


def test_parts_follow_the_features():
    weight = LayerWeight(np.ones((D, H, d)), np.zeros((D, H, d)), np.ones((D, r)), np.ones((r, H, d)))
    cut = of_outputs(lambda w: w[..., :1, :], weight)
    assert [x.shape for x in cut] == [(D, 1, d), (D, 1, d), (D, r), (r, 1, d)]
    cut = of_inputs(lambda w: w[:2], weight)
    assert [x.shape for x in cut] == [(2, H, d), (2, H, d), (2, r), (r, H, d)]
    tree = {"scale": np.ones(D), "weights": (weight, LayerWeight(np.ones(3)))}
    trained, frozen = split_weights(tree)
    assert len(jax.tree.leaves(trained)) == 4 and len(jax.tree.leaves(frozen)) == 2
    jax.tree.map(np.testing.assert_array_equal, join_weights(trained, frozen), tree)
