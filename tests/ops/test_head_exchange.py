"""Heads exchanged around attention, alone and with a ring: against dense attention, and refused by name."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.sharded_ring_attention import sharded_ring_attention
from tests.dense import attention as exact_attention
from tests.helpers import assert_close, normal, ring_mesh
from tests.ops.kernels.test_flash_attention import rounded, rounding_errors
from tests.ops.rings import LAYOUTS, arrays, dense, jit_as_written, on_ring, segments_with_empty_rows

SIZES = [(n, u) for n in (2, 4, 6, 8) for u in (2, 3, 4, 8) if n % u == 0]
"""Devices, and those of a rank."""

HEADS = {"gqa": (24, 8), "mha": (24, 24), "mqa": (24, 1), "3 of 24": (24, 3), "2 of 24": (24, 2)}
"""Query heads and key heads: as many as the exchange needs, more, fewer, and some that it does not divide."""


def cases(quick):
    return [
        pytest.param(*size, layout, heads, marks=() if (*size, layout, heads) in quick else pytest.mark.slow)
        for size in SIZES
        for layout in LAYOUTS
        for heads in HEADS
    ]


QUICK = {
    (2, 2, "zigzag", "gqa"),
    (4, 2, "zigzag", "mqa"),
    (6, 3, "zigzag", "2 of 24"),
    (8, 2, "striped", "gqa"),
    (8, 4, "zigzag", "2 of 24"),
    (8, 4, "contiguous", "mha"),
    (8, 8, "striped", "3 of 24"),
}


@pytest.mark.usual("8-2-striped-gqa", "8-4-zigzag-2 of 24", "2-2-zigzag-gqa")
@pytest.mark.parametrize("n, u, layout, heads", cases(QUICK))
def test_packed_documents_bias_lse_and_empty_rows(n, u, layout, heads):
    """Everything at once: o, lse, dq, dk, dv and dbias are those of one device."""
    T, (H, K) = 12 * n, HEADS[heads]
    inputs, cotangents = arrays(T, H=H, K=K, d=4, bias=True)
    ids = segments_with_empty_rows(T)
    out = on_ring(n, layout, inputs, cotangents, ids, ulysses=u, q_chunk=10, k_chunk=7)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_documents(layout):
    inputs, cotangents = arrays(8 * 6, H=8, K=2)
    assert_close(on_ring(8, layout, inputs, cotangents, ulysses=4), dense(inputs, cotangents))


def test_bidirectional_with_other_keys():
    """T != S, odd lengths."""
    inputs, cotangents = arrays(4 * 5, 4 * 7, bias=True)
    out = on_ring(4, "zigzag", inputs, cotangents, ulysses=2, causal=False)
    assert_close(out, dense(inputs, cotangents, causal=False))


@pytest.mark.parametrize("T, u", [(3, 2), (1, 4)])
def test_zigzag_with_odd_shards(T, u):
    """The halves of a rank's u T tokens are whole where those of a device are not."""
    inputs, cotangents = arrays(4 * T)
    assert_close(on_ring(4, "zigzag", inputs, cotangents, ulysses=u), dense(inputs, cotangents))


def test_vmap_of_heads_exchanged_among_all():
    q, k, v = normal(0, 3, 1, 8, 4, 2), normal(1, 3, 1, 8, 2, 2), normal(2, 3, 1, 8, 2, 2)

    def summed(attend):
        return jax.jit(jax.vmap(jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), argnums=(0, 1, 2))))(q, k, v)

    exchanged = summed(partial(sharded_ring_attention, mesh=ring_mesh(4), ulysses=4))
    assert_close(dict(enumerate(exchanged)), dict(enumerate(summed(dense_attention))))


@pytest.mark.slow
def test_copies_of_key_heads_do_not_round_their_gradients():
    """Two key heads on four devices, in bfloat16: errors are those of one device."""
    inputs, cotangents = rounded(*arrays(1024, B=1, H=8, K=2, d=64))
    exact, options = exact_attention(inputs, cotangents), dict(compile=jit_as_written)
    found = rounding_errors(on_ring(4, "zigzag", inputs, cotangents, ulysses=4, **options), exact)
    limits = rounding_errors(on_ring(1, "contiguous", inputs, cotangents, **options), exact)
    assert all(found[name] <= 1.05 * limits[name] for name in found), (found, limits)


@pytest.mark.parametrize(
    "n, u, H, message",
    [
        (8, 3, 12, "ulysses=3 does not divide the 8 devices of the mesh axis 'sp'"),
        (8, 4, 6, "ulysses=4 does not divide the 6 query heads of a device"),
        (8, 0, 8, "ulysses=0 does not divide"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_by_name(n, u, H, message):
    def attend(x):
        return ring_attention(x, x, x, axis_name="sp", ulysses=u)

    run = jax.shard_map(attend, mesh=ring_mesh(n), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, jax.ShapeDtypeStruct((1, 8 * n, H, 4), jnp.float32))


@pytest.mark.parametrize("u", [2, 0, -1])
def test_one_device_exchanges_nothing(u):
    q = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=f"ulysses={u} exchanges heads between devices; axis_name is None"):
        ring_attention(q, q, q, axis_name=None, ulysses=u)
