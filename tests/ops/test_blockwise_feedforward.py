"""Blockwise feed-forward, embedding and chunked cross-entropy against their dense oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.blockwise_feedforward import blockwise_feedforward, swiglu
from ringformer.ops.cross_entropy import cross_entropy
from ringformer.ops.dense_reference import dense_cross_entropy
from ringformer.ops.embedding import CHUNK, embed
from tests.helpers import assert_close, normal, relative_error

B, T, D, F, V = 2, 50, 12, 20, 37


def gradients(function, *args, seed=9):
    y, vjp = jax.vjp(function, *args)
    return y, *vjp(jnp.asarray(normal(seed, *y.shape)).astype(y.dtype))


@pytest.mark.parametrize("chunk", [1, 7, 10, 25, 50, 64])
def test_feedforward(chunk):
    """Chunks that divide, that do not, and one larger than the sequence."""
    x, w = (
        jnp.asarray(normal(0, B, T, D)),
        tuple(jnp.asarray(normal(i, *s)) for i, s in enumerate(((D, F), (D, F), (F, D)))),
    )
    actual = gradients(lambda x, *w: blockwise_feedforward(swiglu, w, x, chunk), x, *w)
    expected = gradients(lambda x, *w: swiglu(w, x), x, *w)
    names = ("y", "dx", "dw_gate", "dw_up", "dw_down")
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)))


def test_feedforward_sums_bfloat16_weight_gradients_in_float32():
    """256 chunks of one token: summing them in bfloat16 would lose several percent."""
    x, w = normal(0, 1, 256, D), [normal(i, *s) for i, s in enumerate(((D, F), (D, F), (F, D)))]
    x, *w = (jnp.asarray(a, jnp.bfloat16) for a in (x, *w))
    chunked = gradients(lambda x, *w: blockwise_feedforward(swiglu, w, x, 1), x, *w)
    whole = gradients(lambda x, *w: swiglu(w, x), x, *w)
    exact = gradients(lambda x, *w: swiglu(w, x), *(a.astype(jnp.float32) for a in (x, *w)))
    for i in (2, 3, 4):
        assert relative_error(chunked[i], exact[i]) <= 2 * relative_error(whole[i], exact[i])


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 64])
def test_cross_entropy(chunk):
    x, head = jnp.asarray(normal(0, B, T, D)), jnp.asarray(normal(1, D, V))
    rng = np.random.default_rng(2)
    targets, mask = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32), jnp.asarray(rng.random((B, T)) < 0.6)
    actual = gradients(lambda x, h: cross_entropy(x, h, targets, mask, chunk), x, head)
    expected = gradients(lambda x, h: dense_cross_entropy(x, h, targets, mask), x, head)
    names = ("loss", "dx", "dhead")
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)))
    assert relative_error(cross_entropy(x, head, targets, mask, chunk), expected[0]) < 1e-6  # without gradients too


def test_cross_entropy_of_an_empty_mask_is_zero_without_gradient():
    x, head = jnp.asarray(normal(0, B, T, D)), jnp.asarray(normal(1, D, V))
    targets, mask = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T), bool)
    for value in gradients(lambda x, h: cross_entropy(x, h, targets, mask, 16), x, head):
        assert not np.asarray(value).any()


def test_cross_entropy_never_holds_the_logits():
    """Compiled temporaries of loss and gradients stay below the size of [T, V]."""
    T, D, V = 4096, 8, 2048
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, T, D), (D, V)))
    targets, mask = jnp.zeros((1, T), jnp.int32), jnp.ones((1, T), bool)
    step = jax.jit(jax.value_and_grad(lambda x, h: cross_entropy(x, h, targets, mask, 64), argnums=(0, 1)))
    assert step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes < T * V * 4 / 8


def test_embedding_gradient_is_summed_in_float32():
    """One token 4096 times in bfloat16: a bfloat16 sum would stop growing at 256."""
    table, tokens = jnp.ones((4, 3), jnp.bfloat16), jnp.full((1, 4096), 2, jnp.int32)
    y, vjp = jax.vjp(lambda t: embed(t, tokens), table)
    (dtable,) = vjp(jnp.ones_like(y))
    assert dtable.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(dtable, np.float32)[:, 0], [0, 0, 4096, 0])


def test_embedding_gradients_go_to_their_own_rows():
    """More tokens than one chunk, not a multiple of it, of several sequences."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, V, (B, CHUNK + 37)), jnp.int32)
    table = jnp.asarray(normal(0, V, D))
    actual = gradients(lambda t: embed(t, tokens), table)
    expected = gradients(lambda t: jax.nn.one_hot(tokens, V) @ t, table)
    assert_close(dict(zip(("y", "dtable"), actual, strict=True)), dict(zip(("y", "dtable"), expected, strict=True)))
