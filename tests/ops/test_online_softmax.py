"""The running softmax: any way of cutting the keys into blocks gives the whole softmax."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops import online_softmax
from tests.helpers import assert_close, normal

B, K, G, T, S, d = 2, 2, 3, 4, 12, 5


def in_blocks(s, v, edges, dtype=jnp.float32):
    state = online_softmax.init(s.shape[:-1], v.shape[-1])
    for start, stop in pairwise(edges):
        state = online_softmax.update(state, jnp.asarray(s[..., start:stop]), jnp.asarray(v[:, :, start:stop], dtype))
    return dict(o=online_softmax.output(state), lse=online_softmax.log_sum_exp(state.m, state.l))


def at_once(s, v):
    s, v = s.astype(np.float64), v.astype(np.float64)
    with np.errstate(divide="ignore"):
        top = np.where(np.isneginf(s.max(-1)), 0, s.max(-1))
        p = np.exp(s - top[..., None])
        total = p.sum(-1)
        lse = np.log(total) + top
    return dict(o=np.einsum("bkgts,bksd->bkgtd", p / np.where(total, total, 1)[..., None], v), lse=lse)


@pytest.mark.parametrize("edges", [(0, 12), (0, 1, 2, 12), (0, 5, 10, 12), tuple(range(13))])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["small logits", "logits whose exponential overflows"])
def test_blocks_of_any_size_equal_the_whole_softmax(edges, size):
    """o and lse do not depend on how the keys arrive, nor on the size of the logits."""
    s, v = size * normal(0, B, K, G, T, S), normal(1, B, K, S, d)
    assert_close(in_blocks(s, v, edges), at_once(s, v), 1e-6 * max(1, size / 10))


def test_hidden_keys_and_empty_rows():
    """-inf hides a key, also for a whole block before or after others; a row that sees nothing gives 0 and -inf."""
    s, v = normal(0, B, K, G, T, S), normal(1, B, K, S, d)
    s[..., 0, :] = -np.inf  # nothing at all
    s[..., 1, :6] = -np.inf  # nothing in the first block
    s[..., 2, 6:] = -np.inf  # nothing in the second
    out = in_blocks(s, v, (0, 6, 12))
    assert_close(out, at_once(s, v), 1e-6)
    assert (out["o"][..., 0, :] == 0).all() and np.isneginf(out["lse"][..., 0]).all()


def test_state_is_float32_for_bfloat16_values():
    """Only the probabilities that meet bfloat16 values are rounded; sums, maxima and outputs are float32."""
    s, v = normal(0, B, K, G, T, S), normal(1, B, K, S, d)
    out = in_blocks(s, v, (0, 6, 12), jnp.bfloat16)
    assert out["o"].dtype == out["lse"].dtype == jnp.float32
    expected = at_once(s, np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32))
    assert_close({"lse": out["lse"]}, {"lse": expected["lse"]}, 1e-6)
    assert_close({"o": out["o"]}, {"o": expected["o"]}, 4e-3)
