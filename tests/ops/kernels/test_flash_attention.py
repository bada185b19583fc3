"""The TPU kernels in Pallas' interpreter, on the CPU: against dense attention, and for races between their copies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringformer.ops import online_softmax
from ringformer.ops.blockwise_attention import Cotangents, Keys, Queries
from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.kernels import pair_table
from ringformer.ops.kernels.block_kernels import check_kernel
from ringformer.ops.kernels.flash_attention import LOG_UNIT, block_backward, block_forward, prepare
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.work_list import cut_axis, make_work_list
from tests.dense import attention as exact_attention
from tests.helpers import assert_close, errors, normal
from tests.ops.rings import LAYOUTS, arrays, dense, jit_as_written, on_ring, segments_with_empty_rows


def on_pallas_ring(n, layout, *given, **options):
    """The interpreter knows no varying axes; compiled programs are checked with them (`test_compiled_kernels.py`)."""
    with pltpu.force_tpu_interpret_mode():
        return on_ring(n, layout, *given, check_vma=False, kernel="pallas", **options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", *LAYOUTS[:2]])
def test_packed_documents_bias_lse_and_empty_rows(layout):
    """GQA, documents across shard edges, a key bias, lengths that are no whole chunks, a cotangent for lse."""
    T = 2 * 200
    inputs, cotangents = arrays(T, B=1, bias=True, d=64)
    segment_ids = q_ids, _ = tuple(ids[:1] for ids in segments_with_empty_rows(T))
    out = on_pallas_ring(2, layout, inputs, cotangents, segment_ids, scale=0.5)
    assert_close(out, dense(inputs, cotangents, segment_ids=segment_ids, scale=0.5))
    empty = q_ids == -1
    assert (out["o"][empty] == 0).all() and (out["dq"][empty] == 0).all()
    assert np.isneginf(out["lse"].swapaxes(1, 2)[empty]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "n", "d"),
    [
        ("zigzag", 2, 100),
        *(
            pytest.param(x, n, d, marks=pytest.mark.slow)
            for x, n, d in (("striped", 3, 128), ("contiguous", 4, 80), ("zigzag", 1, 256))
        ),
    ],
)
def test_plain_causal(layout, n, d):
    inputs, cotangents = arrays(n * 256, B=1, H=2, K=2, d=d)
    expected = dense(inputs, cotangents)
    assert_close(on_pallas_ring(n, layout, inputs, cotangents, q_chunk=128, k_chunk=128), expected)


@pytest.mark.slow
def test_long_documents_that_end_elsewhere_in_every_row():
    """Pairs of chunks within one document, pairs that a boundary cuts in one row or in both, and pairs of two."""
    T = 2 * 512
    inputs, cotangents = arrays(T, B=2, H=2, K=1)
    ids = (np.stack([np.searchsorted(ends, np.arange(T), side="right") for ends in ([300, 640], [700])]),) * 2
    out = on_pallas_ring(2, "zigzag", inputs, cotangents, ids, q_chunk=128, k_chunk=128)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


def test_gradients_of_one_half_of_the_heads_travel_during_the_other():
    """Four key heads: the kernel adds to dk, dv and dbias that came from the previous rank; documents and a bias."""
    T = 2 * 256
    inputs, cotangents = arrays(T, B=1, H=4, K=4, bias=True, d=64)
    ids = (np.searchsorted([100, 400], np.arange(T), side="right")[None],) * 2
    out = on_pallas_ring(2, "zigzag", inputs, cotangents, ids, q_chunk=128, k_chunk=128)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


@pytest.mark.slow
def test_heads_exchanged_around_chunks_that_are_filled_up():
    """Two devices a rank, whose parts of 90 tokens no device holds whole; 4 key heads, documents and a bias."""
    T = 4 * 90
    inputs, cotangents = arrays(T, B=1, H=8, K=8, bias=True, d=64)
    ids = (np.searchsorted([100, 290], np.arange(T), side="right")[None],) * 2
    out = on_pallas_ring(4, "zigzag", inputs, cotangents, ids, ulysses=2, q_chunk=128, k_chunk=128)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


EXTREMES = -(2**31), 1 - 2**31, 2 - 2**31, -1, 0, 2**31 - 2, 2**31 - 1


@pytest.mark.usual("ascending")
@pytest.mark.parametrize("ids", [None, EXTREMES, EXTREMES[::-1]], ids=["none", "ascending", "descending"])
def test_what_fills_chunks_up_is_seen_by_nobody(ids):
    """Parts of 180 tokens, in chunks of 128 and 256; whatever the ids, and without any."""
    T = 2 * 180
    inputs, cotangents = arrays(T, B=1, H=1, K=1, bias=True, seed=3)
    if ids is not None:
        ids = (np.repeat(np.array(ids, np.int32), -(-T // len(ids)))[None, :T],) * 2
    out = on_pallas_ring(1, "zigzag", inputs, cotangents, ids, q_chunk=128, k_chunk=256)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


def test_biases_down_to_the_least_number():
    """Masks of others: the first row sees a key of such a bias alone."""
    inputs, cotangents = arrays(140, B=1, H=2, K=1, bias=True)
    inputs["bias"][:, ::2] = np.finfo(np.float32).min
    inputs["bias"][:, 0::4] = -2.5e38
    cotangents["dlse"][:] = 0
    out = on_pallas_ring(1, "contiguous", inputs, cotangents)
    expected = dense(inputs, cotangents)
    names = ("o", "dq", "dk", "dv", "dbias")
    assert_close({name: out[name] for name in names}, {name: expected[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_list_that_is_cut(packed, monkeypatch):
    """Within the keys of a chunk of queries and the queries of one of keys: a call goes on where the last ended."""
    monkeypatch.setattr(pair_table, "MOST_PAIRS", 4)
    inputs, cotangents = arrays(2 * 512, B=1, H=2, K=1, bias=True)
    ids = tuple(x[:1] for x in segments_with_empty_rows(2 * 512)) if packed else None
    out = on_pallas_ring(2, "zigzag", inputs, cotangents, ids, q_chunk=128, k_chunk=128)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


@pytest.mark.slow
def test_bidirectional_and_a_scale_that_is_negative():
    inputs, cotangents = arrays(2 * 200, B=1, H=2, K=1)
    expected = dense(inputs, cotangents, causal=False, scale=-0.3)
    assert_close(on_pallas_ring(2, "contiguous", inputs, cotangents, causal=False, scale=-0.3, k_chunk=256), expected)


@pytest.fixture
def races(monkeypatch):
    """Of each call: whether the interpreter found two accesses that nothing orders."""
    states = []

    class Recorded(interpret_pallas_call.RaceDetectionState):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            states.append(self)

    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", Recorded)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield states


def test_a_copy_that_nobody_waits_for_is_a_race(races):
    """The detector itself: a block is read while it arrives."""

    def kernel(x, y, arrived, done):
        copy = pltpu.make_async_copy(x, arrived, done)
        copy.start()
        y[...] = arrived[...]
        copy.wait()

    hbm, block = pl.BlockSpec(memory_space=pl.ANY), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    scratch = [pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA(())]
    call = pl.pallas_call(kernel, out_shape=block, in_specs=[hbm], scratch_shapes=scratch)
    try:  # JAX 0.12 raises it, JAX 0.10 notes it
        jax.block_until_ready(call(jnp.ones((8, 128))))
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
    else:
        assert [state.races_found for state in races] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_chunks", "k_chunks", "most", "tables"), [(1, 3, 3, 1), (2, 2, 4, 1), (3, 1, 3, 1), (2, 2, 3, 2), (3, 1, 1, 3)]
)
def test_no_copy_races_with_another(q_chunks, k_chunks, most, tables, races, monkeypatch):
    """dq is fetched ahead and written behind, into the same place again after one pair or two; a list that is cut goes
    on with the dk and dv of the keys between whose queries it was."""
    monkeypatch.setattr(pair_table, "MOST_PAIRS", most)
    T, S, d, scale = 128 * q_chunks, 128 * k_chunks, 128, 0.1
    work_list = make_work_list("contiguous", False, cut_axis(T, 1, 128), cut_axis(S, 1, 128), None)
    queries = Queries(jnp.asarray(normal(0, 1, 2, 1, T, d)), None)
    keys = Keys(jnp.asarray(normal(1, 2, 1, 2, S, d)), None, None)
    do, dq = jnp.asarray(normal(2, 1, 2, 1, T, d)), jnp.asarray(normal(3, 1, 2, 1, T, d))

    def both(queries, keys, do, dq):
        state = block_forward(online_softmax.init(queries.q.shape[:-1], d), queries, keys, work_list, scale)
        o = online_softmax.output(state)
        m, weight = online_softmax.shift_and_weight(state.m, state.l)
        rows = jnp.stack([m, weight, (o * do).sum(-1)])
        return o, block_backward(dq, queries, keys, prepare(Cotangents(do, rows)), work_list, scale)

    o, (dq_sum, dkeys) = jax.block_until_ready(jax.jit(both)(queries, keys, do, dq))
    assert [state.races_found for state in races] == [False] * (2 * tables)
    q, (k, v) = queries.q[:, :, 0].swapaxes(1, 2), keys.kv.swapaxes(2, 3)
    expected, pull = jax.vjp(partial(dense_attention, causal=False, scale=scale), q, k, v)
    dq_, dk, dv = pull(do[:, :, 0].swapaxes(1, 2))
    found = dict(
        o=o[:, :, 0].swapaxes(1, 2),
        dq=(dq_sum - dq)[:, :, 0].swapaxes(1, 2),
        dk=dkeys.kv[0].swapaxes(1, 2),
        dv=dkeys.kv[1].swapaxes(1, 2),
    )
    assert_close(found, dict(o=expected, dq=dq_, dk=dk, dv=dv))


def rounded(inputs, cotangents):
    """In bfloat16, with nothing asked of lse."""
    to_bfloat16 = lambda arrays: {name: np.asarray(x, jnp.bfloat16) for name, x in arrays.items()}  # noqa: E731
    return to_bfloat16(inputs), to_bfloat16(cotangents) | dict(dlse=np.zeros_like(cotangents["dlse"]))


def rounding_errors(found, expected):
    """Of what comes in bfloat16; and lse, which is float32 throughout, is exact."""
    found = errors(found, expected)
    assert found.pop("lse") < 6e-8
    return found


def test_bfloat16_gradients_are_as_exact_as_those_of_xla():
    """Of three sequences: random numbers, rows with a few large weights, and values of a mean of 10, where delta all
    but cancels. The two round the same numbers: p, ds, and what they return."""
    inputs, cotangents = arrays(512, B=3, H=2, K=1, d=64)
    inputs["q"][1] *= 8
    inputs["v"][2] += 10
    inputs, cotangents = rounded(inputs, cotangents)
    exact, chunks = exact_attention(inputs, cotangents), dict(compile=jit_as_written, q_chunk=256, k_chunk=128)
    ours = on_pallas_ring(1, "zigzag", inputs, cotangents, **chunks)
    of_xla = on_ring(1, "zigzag", inputs, cotangents, **chunks)
    for b in range(3):
        found, limits = (
            rounding_errors(*({name: x[b] for name, x in of.items()} for of in (out, exact))) for out in (ours, of_xla)
        )
        assert all(found[name] <= 1.05 * limits[name] for name in found), (b, found, limits)


def test_bfloat16_errors_do_not_grow_with_chunks_and_hops():
    """Two ranks, 16 chunks of keys: o, l and dq stay float32 from visit to visit, dk and dv from hop to hop. The error
    is XLA's of one device and one chunk."""
    T = 16 * 128
    inputs, cotangents = rounded(*arrays(T, B=1, H=1, K=1, d=64))
    exact = exact_attention(inputs, cotangents)
    ours = on_pallas_ring(2, "zigzag", inputs, cotangents, compile=jit_as_written, q_chunk=256, k_chunk=128)
    plain = on_ring(1, "contiguous", inputs, cotangents, compile=jit_as_written, q_chunk=T, k_chunk=T)
    found, limits = rounding_errors(ours, exact), rounding_errors(plain, exact)
    assert all(found[name] <= 1.05 * limits[name] for name in found), (found, limits)


def test_what_a_kernel_cannot_have_is_refused_by_name():
    q = jnp.zeros((1, 128, 2, 64), jnp.float16)
    with pytest.raises(ValueError, match="kernel='pallas' computes bfloat16 and float32; kernel='xla' takes float16"):
        ring_attention(q, q, q, axis_name=None, kernel="pallas")
    with pytest.raises(ValueError, match="kernel='cuda': choose one of xla, pallas"):
        check_kernel("cuda", q.dtype)


def test_second_derivatives_are_refused_by_name():
    q = jnp.ones((1, 128, 1, 64))

    def loss(q):
        return ring_attention(q, q, q, axis_name=None, kernel="pallas").sum()

    with pltpu.force_tpu_interpret_mode(), pytest.raises(NotImplementedError, match="kernel='pallas' has no second"):
        jax.jvp(jax.grad(loss), (q,), (q,))


def test_logits_are_counted_in_binary_digits():
    assert np.exp(LOG_UNIT) == pytest.approx(2.0)
