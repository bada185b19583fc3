"""The oracle itself, against loops over single numbers in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.tokenwise.blockwise_feedforward import gated
from tests.helpers import assert_close, normal, values_and_gradients

B, T, H, K, d = 2, 6, 4, 2, 3


def attention_by_loops(q, k, v, causal, q_ids, k_ids, bias, scale):
    """Attention one query row and one key at a time, float64."""
    (B, T, H, d), (S, K) = q.shape, k.shape[1:3]
    o, lse = np.zeros(q.shape), np.full((B, H, T), -np.inf)
    for b, t, h in np.ndindex(B, T, H):
        kv_head = h // (H // K)
        seen = [s for s in range(S) if (not causal or s <= t) and q_ids[b, t] == k_ids[b, s]]
        if not seen:
            continue
        logits = [sum(q[b, t, h, i] * k[b, s, kv_head, i] for i in range(d)) * scale + bias[b, s] for s in seen]
        weights = np.exp(np.array(logits, np.float64))
        lse[b, h, t] = np.log(weights.sum())
        o[b, t, h] = sum(w * v[b, s, kv_head].astype(np.float64) for w, s in zip(weights, seen, strict=True))
        o[b, t, h] /= weights.sum()
    return o, lse


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("causal, S", [(True, T), (False, T), (False, 9)], ids=["causal", "bidirectional", "cross"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_loops(heads, causal, S, packed):
    """Every option of dense attention equals its definition; rows that see nothing are 0 with lse -inf."""
    H, K = heads
    q, k, v, bias = normal(0, B, T, H, d), normal(1, B, S, K, d), normal(2, B, S, K, d), normal(3, B, S)
    q_ids, k_ids = np.zeros((B, T), np.int32), np.zeros((B, S), np.int32)
    options = {}
    if packed:
        q_ids[:, 3:], k_ids[:, 2:] = 1, 1
        q_ids[1, 4] = 7
        options = dict(segment_ids=(q_ids, k_ids), bias=bias, scale=0.7)
    o, lse = dense_attention(q, k, v, causal=causal, return_lse=True, **options)
    expected = attention_by_loops(
        q, k, v, causal, q_ids, k_ids, bias if packed else 0 * bias, 0.7 if packed else d**-0.5
    )
    assert_close({"o": o, "lse": lse}, dict(zip(("o", "lse"), expected, strict=True)), 1e-6)
    if packed:
        assert (o[1, 4] == 0).all() and np.isneginf(lse[1, :, 4]).all()


def test_segment_ids_as_one_array_stand_for_both_sides():
    """`segment_ids=ids` means `(ids, ids)`."""
    q, k, v = normal(0, B, T, H, d), normal(1, B, T, K, d), normal(2, B, T, K, d)
    ids = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]], np.int32)
    one, two = (dense_attention(q, k, v, segment_ids=x) for x in (ids, (ids, ids)))
    assert (one == two).all()


def test_gradients_equal_finite_differences():
    """The oracle's gradients, lse's included, are those of its values; an empty row gives none and never NaN."""
    with jax.enable_x64(True):
        inputs = dict(q=normal(0, 1, 4, 2, 3), k=normal(1, 1, 4, 1, 3), v=normal(2, 1, 4, 1, 3), bias=normal(3, 1, 4))
        inputs = {name: x.astype(np.float64) for name, x in inputs.items()}
        ids = np.array([[0, 5, 0, 0]], np.int32), np.array([[0, 0, 0, 0]], np.int32)
        cotangents = dict(do=normal(4, 1, 4, 2, 3).astype(np.float64), dlse=normal(5, 1, 2, 4).astype(np.float64))

        @jax.jit
        def values(inputs):
            return dense_attention(**inputs, segment_ids=ids, return_lse=True)

        def loss(inputs):
            o, lse = map(np.asarray, values(inputs))
            return (o * cotangents["do"]).sum() + np.where(np.isneginf(lse), 0, lse * cotangents["dlse"]).sum()

        out = values_and_gradients(lambda **x: values(x), inputs, cotangents)
        for name, x in inputs.items():
            numeric = np.zeros_like(x)
            for i in np.ndindex(x.shape):
                step = np.zeros_like(x)
                step[i] = 1e-6
                numeric[i] = (loss({**inputs, name: x + step}) - loss({**inputs, name: x - step})) / 2e-6
            assert_close({name: out[f"d{name}"]}, {name: numeric}, 1e-7)
        assert (np.asarray(out["dq"])[0, 1] == 0).all()


def test_feedforward_equals_loops():
    """SwiGLU, one hidden unit at a time."""
    x, gate, up, down = normal(0, 2, 3, 4), normal(1, 4, 5), normal(2, 4, 5), normal(3, 5, 4)
    expected = np.zeros(x.shape)
    for b, t in np.ndindex(2, 3):
        for f in range(5):
            g = float(x[b, t].astype(np.float64) @ gate[:, f])
            expected[b, t] += g / (1 + np.exp(-g)) * (x[b, t].astype(np.float64) @ up[:, f]) * down[f]
    assert_close({"y": gated(jax.tree.map(jnp.asarray, (gate, up, down)), jnp.asarray(x))}, {"y": expected}, 1e-6)
