"""Windows, sinks, capped logits and first tokens, over the ring and against attention in float64 (`tests/dense.py`)."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ringformer.ops import layouts
from ringformer.ops.argument_checks import as_numbers, as_sinks
from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from tests.dense import attention as exact
from tests.helpers import assert_close, packed_segments, values_and_gradients
from tests.ops.rings import HEADS, arrays, on_ring, ring_mesh

CHUNKS = dict(q_chunk=4, k_chunk=4)
L = 8
"""Tokens of a part of a shard."""


def tokens(layout, ranks):
    return layouts.PARTS[layout] * ranks * L


def windows(layout, n, quick):
    """From one key to more than the sequence: within a chunk, a part, at its edges, over one part, over many."""
    T = tokens(layout, n)
    every = {1, 2, 5, L, L + 1, L + 2, 2 * L + 1, 3 * L - 2, T // 2 + 3, T - L - 1, T - 1, T, T + 5}
    return [
        pytest.param(layout, n, W, marks=() if W in quick else pytest.mark.slow, id=f"{layout}-{n}-{W}")
        for W in sorted(every)
        if W >= 1
    ]


CASES = [
    *windows("zigzag", 1, quick=(5, 12)),
    *windows("zigzag", 2, quick=(9,)),
    *windows("zigzag", 4, quick=(1, 8, 17, 35, 63, 64)),
    *windows("zigzag", 8, quick=(10, 67, 119)),
    *windows("contiguous", 1, quick=(2,)),
    *windows("contiguous", 4, quick=(10, 31)),
    *windows("contiguous", 8, quick=(22, 35)),
]


@pytest.mark.usual("zigzag-4-35", "contiguous-8-22", "contiguous-4-31", "zigzag-4-17", "zigzag-4-8", "contiguous-4-10")
@pytest.mark.parametrize(("layout", "n", "W"), CASES)
def test_windows_of_every_reach(layout, n, W):
    """With GQA, a bias, sinks, capped logits, a scale, a cotangent of lse, and first tokens that every query sees."""
    T = tokens(layout, n)
    options = dict(window=W, logit_softcap=1.5, scale=0.7, attend_first=W % 5)
    inputs, cotangents = arrays(T, bias=True, sinks=True)
    assert_close(on_ring(n, layout, inputs, cotangents, **CHUNKS, **options), exact(inputs, cotangents, **options))


@pytest.mark.parametrize(
    ("layout", "n", "u", "W"),
    [
        ("zigzag", 8, 2, 21),
        ("contiguous", 8, 4, 40),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("zigzag", 6, 3, 9), ("zigzag", 8, 8, 30))),
    ],
)
def test_heads_exchanged_around_windows(layout, n, u, W):
    """u neighbours hold a part together; every device has the sinks of its own heads."""
    T, heads = n * L * 2, dict(H=24, K=2) if u == 3 else dict(H=8, K=2)
    inputs, cotangents = arrays(T, bias=True, sinks=True, **heads)
    out = on_ring(n, layout, inputs, cotangents, ulysses=u, window=W, attend_first=3, **CHUNKS)
    assert_close(out, exact(inputs, cotangents, window=W, attend_first=3))


@pytest.mark.usual("both_ways-1", "one_way-2")
@pytest.mark.parametrize(("form", "K"), [("one_way", 2), ("both_ways", 2), ("both_ways", 1), ("gathered", 2)])
def test_full_attention_with_sinks_and_capped_logits(form, K):
    """Every form of the ring adds the sinks once, though two streams may have states of the same rows."""
    inputs, cotangents = arrays(4 * 2 * L, K=K, sinks=True)
    out = on_ring(4, "zigzag", inputs, cotangents, ring=form, logit_softcap=2.0, **CHUNKS)
    assert_close(out, exact(inputs, cotangents, logit_softcap=2.0))


@pytest.mark.parametrize("form", ["both_ways", "gathered"])
def test_a_window_takes_its_own_way(form):
    inputs, cotangents = arrays(4 * 2 * L)
    assert_close(
        on_ring(4, "zigzag", inputs, cotangents, ring=form, window=12, **CHUNKS), exact(inputs, cotangents, window=12)
    )


@pytest.mark.parametrize(("layout", "n", "W"), [("zigzag", 4, 13), ("contiguous", 4, 30)])
def test_packed_documents_in_windows(layout, n, W):
    T = tokens(layout, n)
    ids = packed_segments(3, 2, T, 5)
    inputs, cotangents = arrays(T, sinks=True)
    out = on_ring(n, layout, inputs, cotangents, (ids, ids), window=W, **CHUNKS)
    assert_close(out, exact(inputs, cotangents, (ids, ids), window=W))


def test_empty_rows_have_only_their_sink():
    """A query of a segment without keys: o = 0, lse = the sink, and its cotangents move the sink alone."""
    T = 2 * 2 * L
    ids = packed_segments(3, 2, T, 2)
    q_ids = ids.copy()
    q_ids[:, 5:9] = -1
    inputs, cotangents = arrays(T, sinks=True)
    out = on_ring(2, "zigzag", inputs, cotangents, (q_ids, ids), **CHUNKS)
    assert (out["o"][:, 5:9] == 0).all() and (out["dq"][:, 5:9] == 0).all()
    assert np.allclose(out["lse"][:, :, 5:9], inputs["sinks"][:, None])
    reference = partial(dense_attention, segment_ids=(q_ids, ids), return_lse=True)
    expected = jax.jit(partial(values_and_gradients, reference))(inputs, cotangents)
    assert_close(out, expected)


def test_a_sink_of_minus_infinity_is_none():
    inputs, cotangents = arrays(2 * 2 * L)
    expected = exact(inputs, cotangents)
    out = on_ring(2, "zigzag", {**inputs, "sinks": np.full(4, -np.inf, np.float32)}, cotangents, **CHUNKS)
    assert (out.pop("dsinks") == 0).all()
    assert_close(out, expected)


def test_the_dense_reference_has_them_too():
    inputs, cotangents = arrays(24, bias=True, sinks=True)
    options = dict(window=7, logit_softcap=1.5, attend_first=3)
    reference = partial(dense_attention, return_lse=True, **options)
    assert_close(values_and_gradients(reference, inputs, cotangents), exact(inputs, cotangents, **options))


# --- TPU kernels in the interpreter -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "length", "options"),
    [
        ("zigzag", 180, dict(window=400, logit_softcap=2.0, attend_first=3)),
        pytest.param("zigzag", 180, dict(window=100), marks=pytest.mark.slow),
        pytest.param("contiguous", 300, dict(window=150, attend_first=130), marks=pytest.mark.slow),
    ],
)
def test_tpu_kernels(layout, length, options):
    """Chunks that are filled up, a window over two parts and one within a part, more first tokens than a chunk."""
    inputs, cotangents = arrays(layouts.PARTS[layout] * 2 * length, B=1, H=1, K=1, d=64, bias=True)
    with pltpu.force_tpu_interpret_mode():  # knows no varying axes, so no sinks, which all devices share
        out = on_ring(
            2, layout, inputs, cotangents, check_vma=False, kernel="pallas", q_chunk=128, k_chunk=128, **options
        )
    assert_close(out, exact(inputs, cotangents, **options))


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=0), "window=0 must be positive"),
        (dict(window=-3), "window=-3 must be positive"),
        (dict(window=4, causal=False), "window=4 counts the last keys .* needs causal=True"),
        (dict(window=4, layout="striped"), "window=4 with layout='striped': .* layout='zigzag'"),
        (dict(attend_first=2), "attend_first=2 adds tokens to a window: pass window too"),
        (dict(window=4, attend_first=-1), "attend_first=-1 must not be negative"),
        (dict(window=4, attend_first=9), "attend_first=9 exceeds a part of a shard, 8 tokens"),
        (dict(window=64, attend_first=9), "attend_first=9 exceeds a part of a shard, 8 tokens"),
        (dict(logit_softcap=0.0), "logit_softcap=0.0 must be a positive, finite number"),
        (dict(logit_softcap=float("inf")), "logit_softcap=inf must be a positive, finite number"),
    ],
)
def test_arguments_that_contradict_each_other(options, message):
    inputs, _ = arrays(2 * 2 * L)
    run = jax.shard_map(
        partial(ring_attention, axis_name="sp", **{"layout": "zigzag", **options}),
        mesh=ring_mesh(2),
        in_specs=HEADS,
        out_specs=HEADS,
    )
    with pytest.raises(ValueError, match=message):
        run(*inputs.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2.5, 0, None), "window=2.5 must be a whole number"),
        ((True, 0, None), "window=True must be a whole number"),
        (("16", 0, None), "window='16' must be a whole number"),
        ((4, None, None), "attend_first=None must be a whole number"),
        ((4, 1.5, None), "attend_first=1.5 must be a whole number"),
        ((4, 0, "a"), "logit_softcap='a' must be a positive, finite number"),
    ],
)
def test_options_that_are_no_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        as_numbers(*given)


def test_numbers_of_arrays_are_numbers():
    numbers = as_numbers(np.int32(16), jax.numpy.int32(2), jax.numpy.float32(5))
    assert numbers == (16, 2, 5.0) and [type(x) for x in numbers] == [int, int, float]


@pytest.mark.parametrize("sinks", [np.zeros(3, np.float32), np.zeros(4, np.int32), np.zeros((4, 1), np.float32)])
def test_sinks_are_one_float_per_head(sinks):
    with pytest.raises(ValueError, match=rf"sinks must be one float per query head, \[4\]; got {sinks.dtype} "):
        as_sinks(sinks, 4)


def test_first_tokens_of_packed_documents_are_refused():
    inputs, _ = arrays(16)
    ids = np.zeros((2, 16), np.int32)
    with pytest.raises(ValueError, match="attend_first=2 counts from the beginning of the sequence"):
        ring_attention(**inputs, axis_name=None, window=4, attend_first=2, segment_ids=ids)


@pytest.mark.parametrize("option", [dict(attend_first=4), dict(logit_softcap=2.0)])
def test_cudnn_names_a_kernel_that_can(option):
    q = np.zeros((1, 16, 2, 8), jax.numpy.bfloat16)
    with pytest.raises(ValueError, match=f"kernel='cudnn' takes no {next(iter(option))} .*kernel='xla' does"):
        ring_attention(q, q, q, axis_name=None, kernel="cudnn", window=8, **option)
