"""Derivatives beyond the gradient: what there is equals the dense oracle's, the rest says what to take instead."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.sharded_ring_attention import sharded_ring_attention
from ringformer.ops.tokenwise.blockwise_feedforward import blockwise_feedforward, gated
from ringformer.ops.tokenwise.cross_entropy import cross_entropy
from ringformer.ops.tokenwise.embedding import embed
from tests.helpers import assert_close, normal, ring_mesh
from tests.ops.rings import jit

T, SHAPE = 8, (1, 8, 2, 4)
IDS = np.repeat([[0, 1, 2]], [3, 2, 3], axis=1).astype(np.int32)
WITH_EMPTY_ROW = np.where(np.arange(T) == 4, 7, IDS).astype(np.int32), IDS


def function(attention, **options):
    """A scalar function of x [B, T, H, d], which is queries, keys and values."""
    weights = normal(1, *SHAPE)
    return lambda x: (attention(x, 0.5 * x, x + 1, **options) ** 2 * weights).sum()


def of_ring(n, layout, **options):
    return function(partial(sharded_ring_attention, mesh=ring_mesh(n), layout=layout, q_chunk=2, k_chunk=2), **options)


def of_one(**options):
    return function(partial(ring_attention, axis_name=None, q_chunk=4, k_chunk=4), **options)


def hessian_vector(f, x, v):
    return jax.jvp(jax.grad(f), (x,), (v,))[1]


def gradient_of_gradient(f, x, v):
    return jax.grad(lambda x: (jax.grad(f)(x) * v).sum())(x)


CASES = {
    "one device": (hessian_vector, of_one, {}),
    "one device, documents, empty row": (hessian_vector, of_one, dict(segment_ids=WITH_EMPTY_ROW)),
    "ring, contiguous, documents": (hessian_vector, partial(of_ring, 2, "contiguous"), dict(segment_ids=IDS)),
    "ring, zigzag": (hessian_vector, partial(of_ring, 2, "zigzag"), {}),
    "one device, reverse over reverse": (gradient_of_gradient, of_one, {}),
    "ring, zigzag, reverse over reverse": (gradient_of_gradient, partial(of_ring, 2, "zigzag"), {}),
}


SLOW = "one device", "ring, zigzag", "ring, zigzag, reverse over reverse"


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in CASES])
def test_second_derivatives_equal_the_oracle(name):
    second, ours, options = CASES[name]
    x, v = normal(0, *SHAPE), normal(2, *SHAPE)
    found = jit(partial(second, ours(**options)))(x, v)
    expected = jit(partial(second, function(dense_attention, **options)))(x, v)
    assert_close(dict(second=found), dict(second=expected))


REFUSED = {
    "documents": of_one(segment_ids=IDS),
    "documents on a ring": of_ring(2, "zigzag", segment_ids=IDS),
    "documents that ascend": of_ring(2, "zigzag", segment_ids=IDS, segments="ascending"),
    "contiguous ring": of_ring(2, "contiguous"),
    "gathered contiguous ring": of_ring(2, "contiguous", ring="gathered"),
    "window on a ring": of_ring(2, "zigzag", window=3),
    "window on a contiguous ring": of_ring(2, "contiguous", window=3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reverse_over_reverse_through_loops_of_data_is_refused_with_the_way_out(name):
    """The message names every cause: documents, windows and the contiguous layout."""
    x = jnp.asarray(normal(0, *SHAPE))
    message = (
        "ring_attention cannot take reverse mode over reverse mode.*with segment_ids, with a window, or in the "
        r"contiguous layout on a ring: .*jax\.jvp\(jax\.grad\(f\), \.\.\.\) or jax\.hessian"
    )
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(partial(gradient_of_gradient, REFUSED[name]), x, x)


OPS = {
    "ring_attention": (of_one(), normal(0, *SHAPE)),
    "cross_entropy": (
        lambda x: cross_entropy(x, x[0], jnp.zeros((1, T), jnp.int32), jnp.ones((1, T), bool), chunk=4),
        normal(0, 1, T, T),
    ),
    "embed": (lambda table: embed(table, jnp.zeros((1, T), jnp.int32)), normal(0, 5, 3)),
    "blockwise_feedforward": (lambda x: blockwise_feedforward(gated, (x[0], x[0], x[0]), x, 4), normal(0, 1, T, T)),
}


@pytest.mark.parametrize("name", OPS)
def test_forward_mode_is_refused_with_the_way_out(name):
    """`jvp` and `linearize`, eagerly and in a compiled program; the gradient is there."""
    f, x = OPS[name]
    message = f"{name} has no forward-mode derivative.*jax.grad.*jax.hessian"
    for forward in (jax.jvp, jax.jit(partial(jax.jvp, f)).lower):
        with pytest.raises(NotImplementedError, match=message):
            forward(*((f,) if forward is jax.jvp else ()), (x,), (x,))
    with pytest.raises(NotImplementedError, match=message):
        jax.linearize(f, x)[1](x)
    assert jax.eval_shape(jax.grad(lambda x: f(x).sum()), x).shape == x.shape


def test_forward_mode_is_refused_on_a_ring():
    x = normal(0, *SHAPE)
    with pytest.raises(NotImplementedError, match="ring_attention has no forward-mode derivative"):
        jax.jvp(of_ring(2, "zigzag", segment_ids=IDS), (x,), (x,))
