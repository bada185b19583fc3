"""Logits of any size, as masks by a large negative bias make them: gradients against a dense softmax in float64."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from tests import dense
from tests.helpers import errors, normal, values_and_gradients
from tests.ops.rings import LAYOUTS, jit, on_ring

BIASES = (-1e4, -1e6, -1e9, float(np.finfo(np.float32).min), 1e6)
CASES = [(bias, where) for bias in BIASES for where in ("half", "all")]
"""One sequence of the batch each: the bias on a random half of the keys and on all that some rows see; on all keys."""
T, H, K, d, SCALE = 32, 2, 1, 4, 0.5


def quarters(seed, *shape):
    """Multiples of 1/4 up to 2: dot products of them are exact in float32, so the bias alone rounds the logits."""
    return np.clip(np.round(4 * normal(seed, *shape)) / 4, -2, 2)


def masked_by_bias():
    B = len(CASES)
    inputs = dict(q=quarters(0, B, T, H, d), k=quarters(1, B, T, K, d), v=normal(2, B, T, K, d))
    ids = np.repeat([0, 1, 2, 3], [5, 9, 11, 7]).astype(np.int32) * np.ones((B, 1), np.int32)
    hidden = np.random.default_rng(3).random((B, T)) < 0.5
    hidden[:, :4] = True  # all that the first rows see under a causal mask
    hidden[ids == 2] = True  # all that the rows of this segment see
    hidden[[where == "all" for _, where in CASES]] = True
    inputs["bias"] = np.where(hidden, np.array([[bias] for bias, _ in CASES]), 0).astype(np.float32)
    return inputs, dict(do=normal(4, B, T, H, d), dlse=normal(5, B, H, T)), (ids, ids)


@lru_cache
def expected(causal, packed):
    """The softmax of logits that were rounded to float32 after the bias was added."""
    inputs, cotangents, ids = masked_by_bias()
    return dense.attention(inputs, cotangents, ids if packed else None, causal=causal, scale=SCALE, logits=np.float32)


def assert_each_close(actual, expected):
    """Each array of each sequence, so each bias, for itself."""
    for b, case in enumerate(CASES):
        found = errors(*({name: x[b] for name, x in out.items()} for out in (actual, expected)))
        assert max(found.values()) <= 1e-5, (case, found)


QUICK = {("zigzag", 4, True, True), ("contiguous", 2, False, False)}
RINGS = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for layout in LAYOUTS
    for n in (1, 2, 4)
    for packed in (True, False)
    for causal in (True, False)
    if causal or layout == "contiguous"
    for case in [(layout, n, causal, packed)]
]


@pytest.mark.parametrize("layout, n, causal, packed", RINGS)
def test_masks_by_a_large_bias(layout, n, causal, packed):
    """-1e4, -1e6, -1e9 and the least float32 on half of the keys, on all of them, on all that some rows see: outputs
    and gradients are those of the softmax of the logits as float32 holds them. A large positive bias, too."""
    inputs, cotangents, ids = masked_by_bias()
    out = on_ring(
        n, layout, inputs, cotangents, ids if packed else None, causal=causal, scale=SCALE, q_chunk=4, k_chunk=4
    )
    assert_each_close(out, expected(causal, packed))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attention", [dense_attention, partial(ring_attention, axis_name=None)])
def test_masks_by_a_large_bias_on_one_device(attention, causal, packed):
    """The oracle itself, which is also `attention="vanilla"`; and the op without an axis and in one chunk."""
    inputs, cotangents, ids = masked_by_bias()
    ids = tuple(map(jnp.asarray, ids)) if packed else None
    attention = partial(attention, return_lse=True, causal=causal, scale=SCALE, segment_ids=ids)
    out = jit(partial(values_and_gradients, attention))(inputs, cotangents)
    assert_each_close(jax.tree.map(np.asarray, out), expected(causal, packed))
