"""Ring attention against dense attention: outputs and each gradient, by relative norm, with random cotangents."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.ring_vjp import SAVED_OUTPUT, SAVED_SOFTMAX
from tests.helpers import assert_close, normal, packed_segments, ring_mesh, values_and_gradients
from tests.hlo import executed_collectives
from tests.ops.rings import (
    LAYOUTS,
    ROWS,
    B,
    arrays,
    d,
    dense,
    jit,
    on_ring,
    segments_with_empty_rows,
)

# --- ring sizes, layouts, everything at once ----------------------------------------------------------------------


PACKED = {"zigzag": (2, 3, 6, 8), "striped": (5, 7), "contiguous": (1, 4)}
PLAIN = {"zigzag": (5,), "striped": (8,), "contiguous": (3,)}


def layouts_and_sizes(quick):
    """Every layout with every ring size; those that `quick` does not list are slow."""
    return [
        pytest.param(layout, n, marks=() if n in quick[layout] else pytest.mark.slow)
        for layout in LAYOUTS
        for n in range(1, 9)
    ]


@pytest.mark.usual("striped-7", "zigzag-6")
@pytest.mark.parametrize("layout, n", layouts_and_sizes(PACKED))
def test_packed_documents_bias_lse_and_empty_rows(layout, n):
    """Every ring size and layout with GQA, documents across shard edges, a key bias, ragged chunks, a scale, a
    cotangent for lse, and queries without any key: those give 0, lse -inf and no gradient."""
    T = n * 10
    inputs, cotangents = arrays(T, bias=True)
    segment_ids = q_ids, _ = segments_with_empty_rows(T)
    expected = dense(inputs, cotangents, segment_ids=segment_ids, scale=0.5)
    out = on_ring(n, layout, inputs, cotangents, segment_ids, scale=0.5, q_chunk=4, k_chunk=4)
    assert_close(out, expected)
    empty = q_ids == -1
    assert (out["o"][empty] == 0).all() and (out["dq"][empty] == 0).all()
    assert np.isneginf(out["lse"].swapaxes(1, 2)[empty]).all()


@pytest.mark.parametrize("layout, n", layouts_and_sizes(PLAIN))
def test_plain_causal(layout, n):
    """Without segment ids the loops have other, mostly static, trip counts: the path that training takes."""
    inputs, cotangents = arrays(n * 12)
    expected = dense(inputs, cotangents)
    assert_close(on_ring(n, layout, inputs, cotangents, q_chunk=4, k_chunk=4), expected)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "mqa"])
@pytest.mark.parametrize("layout", ["zigzag", *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS[:2])])
def test_as_many_key_heads_as_query_heads_or_one(layout, heads):
    """MHA and MQA (GQA everywhere else)."""
    inputs, cotangents = arrays(3 * 8, H=heads[0], K=heads[1])
    assert_close(on_ring(3, layout, inputs, cotangents, q_chunk=4, k_chunk=4), dense(inputs, cotangents))


@pytest.mark.parametrize("layout, n", layouts_and_sizes({"contiguous": (), "striped": (), "zigzag": (4,)}))
def test_bidirectional(layout, n):
    """Without a causal mask the layout is of no consequence, odd lengths included."""
    inputs, cotangents = arrays(n * 9, bias=True)
    expected = dense(inputs, cotangents, causal=False)
    assert_close(on_ring(n, layout, inputs, cotangents, causal=False, q_chunk=4, k_chunk=5), expected)


def test_cross_attention_with_its_own_key_ids():
    """T != S, separate ids of queries and keys, queries of a segment that has no key."""
    n, T, S = 4, 24, 40
    inputs, cotangents = arrays(T, S, bias=True)
    ids = np.repeat([[0, 1, 2, 9], [2, 0, 9, 1]], 6, axis=1), np.repeat([[0, 1, 1, 2], [0, 3, 1, 2]], 10, axis=1)
    ids = tuple(x.astype(np.int32) for x in ids)
    expected = dense(inputs, cotangents, causal=False, segment_ids=ids)
    out = on_ring(n, "contiguous", inputs, cotangents, ids, causal=False, q_chunk=4, k_chunk=4)
    assert_close(out, expected)
    assert np.isneginf(out["lse"]).any() and (out["o"][ids[0] == 9] == 0).all()


# --- chunks ---------------------------------------------------------------------------------------------------------

CHUNKS = [(12, 1, 1), (2, 1, 1), (9, 4, 4), (12, 3, 4), (12, 8, 5), (12, 100, 2), (12, None, None), (1, None, None)]
QUICK_CHUNKS = {"contiguous": (4,), "striped": (0, 1, 2, 3), "zigzag": (2, 3)}


@pytest.mark.usual("zigzag-9-4-4", "zigzag-12-3-4", "contiguous-12-8-5")
@pytest.mark.parametrize(
    "layout, T, q_chunk, k_chunk",
    [
        pytest.param(layout, *chunks, marks=() if i in QUICK_CHUNKS[layout] else pytest.mark.slow)
        for layout in LAYOUTS
        for i, chunks in enumerate(CHUNKS)
    ],
)
def test_any_chunks(layout, T, q_chunk, k_chunk):
    """Chunks of one token, longer than the shard, unequal, or leaving one row over; shards down to one token."""
    n, T = 3, T + T % 2 if layout == "zigzag" else T
    inputs, cotangents = arrays(n * T)
    assert_close(on_ring(n, layout, inputs, cotangents, q_chunk=q_chunk, k_chunk=k_chunk), dense(inputs, cotangents))


# --- edges of the numbers -------------------------------------------------------------------------------------------


def test_scale_of_zero_is_the_mean_of_what_is_visible():
    """0 is a scale like any other, not "unset"."""
    inputs, cotangents = arrays(2 * 4)
    out = on_ring(2, "zigzag", inputs, cotangents, scale=0.0)
    assert_close(out, dense(inputs, cotangents, scale=0.0))
    assert (out["dq"] == 0).all()


def test_bias_of_minus_infinity_hides_keys():
    """Padding keys by bias: no NaN, no gradient to them; a query left without keys gives 0 and lse -inf."""
    inputs, cotangents = arrays(2 * 8, bias=True)
    hidden = inputs["bias"] > 0.5
    hidden[0, :5] = True
    inputs["bias"][hidden] = -np.inf
    out = on_ring(2, "zigzag", inputs, cotangents, q_chunk=3, k_chunk=3)
    by_segment = {**inputs, "bias": np.where(hidden, 0, inputs["bias"]).astype(np.float32)}
    by_segment = dense(by_segment, cotangents, segment_ids=(np.zeros((B, 16), np.int32), hidden.astype(np.int32)))
    for expected in (dense(inputs, cotangents), by_segment):
        assert_close(out, expected)
    assert np.isneginf(out["lse"][0, :, :5]).all() and (out["dbias"][hidden] == 0).all()


def test_large_logits_do_not_overflow():
    """Logits of about 1e4, whose exponentials no float32 holds: finite, and as exact as such logits can be."""
    inputs, cotangents = arrays(4 * 8)
    inputs = {**inputs, "q": 100 * inputs["q"], "k": 100 * inputs["k"]}
    out = on_ring(4, "zigzag", inputs, cotangents, q_chunk=4, k_chunk=4)
    assert_close(out, dense(inputs, cotangents), 2e-3)


def test_perturbing_one_document_changes_no_bit_of_another():
    """Packed neighbours do not see each other."""
    ids = packed_segments(3, B, 40, 3)
    inputs, cotangents = arrays(40)
    other = {name: x + (ids == 1)[..., None, None] * normal(9, *x.shape) for name, x in inputs.items()}
    stacked = jax.tree.map(lambda *x: np.concatenate(x), (inputs, cotangents, ids), (other, cotangents, ids))
    out = on_ring(4, "zigzag", *stacked[:2], (stacked[2], stacked[2]), q_chunk=4, k_chunk=4)
    for x in (out[name] for name in ("o", "dq", "dk", "dv")):
        assert (x[:B][ids != 1] == x[B:][ids != 1]).all() and (x[:B][ids == 1] != x[B:][ids == 1]).any()


# --- on one device, and inside other transforms --------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device_without_an_axis(layout):
    """`axis_name=None` outside any shard_map, under jit and eagerly."""
    inputs, cotangents = arrays(10, bias=True)
    segment_ids = tuple(map(jnp.asarray, segments_with_empty_rows(10)))
    attention = partial(
        ring_attention, axis_name=None, layout=layout, return_lse=True, segment_ids=segment_ids, q_chunk=4, k_chunk=4
    )
    expected = dense(inputs, cotangents, segment_ids=segment_ids)
    assert_close(jit(partial(values_and_gradients, attention))(inputs, cotangents), expected)
    if layout == "zigzag":
        o, lse = attention(**inputs)
        assert_close(dict(o=o, lse=lse), dict(o=expected["o"], lse=expected["lse"]))


def test_numpy_segment_ids_are_accepted():
    """Ids that a jitted gradient closes over as numpy arrays work like any other input."""
    inputs, cotangents = arrays(10)
    ids = segments_with_empty_rows(10)
    attention = partial(ring_attention, axis_name=None, return_lse=True, segment_ids=ids, q_chunk=4, k_chunk=4)
    out = jit(partial(values_and_gradients, attention))(inputs, cotangents)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


@pytest.mark.parametrize("segments", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_the_vma_check(segments):
    """`check_vma=False` gives the same numbers."""
    inputs, cotangents = arrays(4 * 10)
    ids = segments_with_empty_rows(40) if segments else None
    out = on_ring(4, "zigzag", inputs, cotangents, ids, check_vma=False, q_chunk=4, k_chunk=4)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


def layers(attention, policy=None, remat=True):
    """Two layers of `x + attention(x)` in a scan, each rematerialised."""

    def layer(x, w):
        q, k, v = jnp.split(jnp.einsum("btd,de->bte", x, w), 3, axis=-1)
        heads = lambda x: x.reshape(*x.shape[:2], -1, d)  # noqa: E731
        return x + attention(heads(q), heads(k), heads(v)).reshape(x.shape), None

    return lambda x, w: jax.lax.scan(jax.checkpoint(layer, policy=policy) if remat else layer, x, w)[0]


POLICIES = {
    "everything is recomputed": None,
    "output and softmax are kept": jax.checkpoint_policies.save_only_these_names(SAVED_OUTPUT, SAVED_SOFTMAX),
}
# Permutes of a layer on a ring of 4: 3 of [k, v] forward, 3 of them, of dk and of dv backward, and 3 more for a forward
# that is run again. That one and the backward both send a rank's own keys first; the compiler may send them once.
BACKWARD = 3 + 3 + 3
HOPS = {"everything is recomputed": {3 + 3 + BACKWARD, 3 + 2 + BACKWARD}, "output and softmax are kept": {3 + BACKWARD}}


@pytest.mark.parametrize("policy", POLICIES)
def test_rematerialised_layers_in_a_scan(policy):
    """jit of scan over layers of checkpoint of the ring: values, gradients of activations and of replicated weights;
    a policy that keeps o, m and l spares the second forward ring."""
    n, L = 4, 2
    x, w, do = normal(0, B, n * 8, 2 * d), normal(1, L, 2 * d, 6 * d) / 4, normal(2, B, n * 8, 2 * d)

    def per_device(x, w, do):
        attention = partial(ring_attention, axis_name="sp", q_chunk=4, k_chunk=4)
        y, vjp = jax.vjp(layers(attention, POLICIES[policy]), x, w)
        return y, *vjp(do)

    @jit
    def expected(x, w, do):
        y, vjp = jax.vjp(layers(dense_attention, remat=False), x, w)
        return y, *vjp(do)

    run = jax.shard_map(per_device, mesh=ring_mesh(n), in_specs=(ROWS, P(), ROWS), out_specs=(ROWS, ROWS, P()))
    program = jit(run).lower(x, w, do).compile()
    names = "y", "dx", "dw"
    actual = program(x, w, do)
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected(x, w, do), strict=True)))
    hops = sum(m for c, m in executed_collectives(program.as_text()).items() if c.kind == "collective-permute")
    assert hops / L in HOPS[policy]
