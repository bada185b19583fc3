"""Blockwise feed-forward against the function itself."""

import jax.numpy as jnp
import pytest

from ringformer.ops.tokenwise.blockwise_feedforward import blockwise_feedforward, gated
from tests.helpers import assert_close, normal, random_vjp, relative_error

B, T, D, F = 2, 50, 12, 20


@pytest.mark.parametrize("chunk", [1, 7, 10, 25, 50, 64])
def test_feedforward(chunk):
    """Chunks that divide, that do not, and one larger than the sequence."""
    x, w = (
        jnp.asarray(normal(0, B, T, D)),
        tuple(jnp.asarray(normal(i, *s)) for i, s in enumerate(((D, F), (D, F), (F, D)))),
    )
    actual = random_vjp(lambda x, *w: blockwise_feedforward(gated, w, x, chunk), x, *w)
    expected = random_vjp(lambda x, *w: gated(w, x), x, *w)
    names = ("y", "dx", "dw_gate", "dw_up", "dw_down")
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)))


def test_feedforward_sums_bfloat16_weight_gradients_in_float32():
    """256 chunks of one token: summing them in bfloat16 would lose several percent."""
    x, w = normal(0, 1, 256, D), [normal(i, *s) for i, s in enumerate(((D, F), (D, F), (F, D)))]
    x, *w = (jnp.asarray(a, jnp.bfloat16) for a in (x, *w))
    chunked = random_vjp(lambda x, *w: blockwise_feedforward(gated, w, x, 1), x, *w)
    whole = random_vjp(lambda x, *w: gated(w, x), x, *w)
    exact = random_vjp(lambda x, *w: gated(w, x), *(a.astype(jnp.float32) for a in (x, *w)))
    for i in (2, 3, 4):
        assert relative_error(chunked[i], exact[i]) <= 2 * relative_error(whole[i], exact[i])
