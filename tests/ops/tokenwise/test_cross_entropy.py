"""Cross-entropy chunk by chunk against the dense one; what it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.dense_reference import dense_cross_entropy
from ringformer.ops.tokenwise.cross_entropy import cross_entropy
from tests.helpers import assert_close, normal, random_vjp, relative_error

B, T, D, V = 2, 50, 12, 37


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 64])
def test_cross_entropy(chunk):
    x, head = jnp.asarray(normal(0, B, T, D)), jnp.asarray(normal(1, D, V))
    rng = np.random.default_rng(2)
    targets, mask = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32), jnp.asarray(rng.random((B, T)) < 0.6)
    actual = random_vjp(lambda x, h: cross_entropy(x, h, targets, mask, chunk), x, head)
    expected = random_vjp(lambda x, h: dense_cross_entropy(x, h, targets, mask), x, head)
    names = ("loss", "dx", "dhead")
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)))
    assert relative_error(cross_entropy(x, head, targets, mask, chunk), expected[0]) < 1e-6  # without gradients too


def test_cross_entropy_of_an_empty_mask_is_zero_without_gradient():
    x, head = jnp.asarray(normal(0, B, T, D)), jnp.asarray(normal(1, D, V))
    targets, mask = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T), bool)
    for value in random_vjp(lambda x, h: cross_entropy(x, h, targets, mask, 16), x, head):
        assert not np.asarray(value).any()


def test_cross_entropy_never_holds_the_logits():
    """Compiled temporaries of loss and gradients stay below the size of [T, V]."""
    T, D, V = 4096, 8, 2048
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, T, D), (D, V)))
    targets, mask = jnp.zeros((1, T), jnp.int32), jnp.ones((1, T), bool)
    step = jax.jit(jax.value_and_grad(lambda x, h: cross_entropy(x, h, targets, mask, 64), argnums=(0, 1)))
    assert step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes < T * V * 4 / 8
