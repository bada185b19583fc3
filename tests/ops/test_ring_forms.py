"""Rings both ways and gathered keys, alone and with head exchange: against dense attention, and refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.ops import layouts
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.work_list import cut_axis, make_gathered_work_list
from tests.dense import attention as exact_attention
from tests.helpers import assert_close, ring_mesh
from tests.ops.kernels.test_flash_attention import on_pallas_ring, rounded, rounding_errors
from tests.ops.rings import LAYOUTS, arrays, dense, jit_as_written, on_ring, segments_with_empty_rows

FORMS = ("both_ways", "gathered")
SIZES = [(n, u) for n in range(1, 9) for u in (1, 2, 3, 4) if n % u == 0 and n > u]
"""Devices, and those of a rank."""

HEADS = {"gqa": (12, 4), "mha": (12, 12), "mqa": (12, 1), "3 of 12": (12, 3)}
"""Query heads and key heads: halves of heads travel in each direction, or runs of tokens."""

QUICK = {
    (2, 1, "zigzag", "both_ways", "gqa"),
    (3, 1, "contiguous", "both_ways", "3 of 12"),
    (4, 1, "zigzag", "both_ways", "mqa"),
    (5, 1, "contiguous", "gathered", "gqa"),
    (6, 3, "striped", "both_ways", "3 of 12"),
    (7, 1, "zigzag", "gathered", "mqa"),
    (8, 1, "striped", "gathered", "mha"),
    (8, 2, "zigzag", "both_ways", "mha"),
    (8, 4, "zigzag", "gathered", "gqa"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in (
        (*size, layout, form, heads) for size in SIZES for layout in LAYOUTS for form in FORMS for heads in HEADS
    )
]


@pytest.mark.usual("4-1-zigzag-both_ways-mqa", "5-1-contiguous-gathered-gqa")
@pytest.mark.parametrize("n, u, layout, form, heads", CASES)
def test_packed_documents_bias_lse_and_empty_rows(n, u, layout, form, heads):
    """Everything at once: o, lse, dq, dk, dv and dbias are those of one device."""
    T, (H, K) = 12 * n, HEADS[heads]
    inputs, cotangents = arrays(T, H=H, K=K, d=4, bias=True)
    ids = segments_with_empty_rows(T)
    out = on_ring(n, layout, inputs, cotangents, ids, ulysses=u, ring=form, q_chunk=5, k_chunk=4)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


@pytest.mark.parametrize("form", FORMS)
def test_bidirectional_with_other_keys(form):
    """T != S, odd lengths, one key head."""
    inputs, cotangents = arrays(4 * 5, 4 * 7, K=1, bias=True)
    out = on_ring(4, "zigzag", inputs, cotangents, ring=form, causal=False)
    assert_close(out, dense(inputs, cotangents, causal=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "K"),
    [
        ("both_ways", 4),
        ("gathered", 2),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("both_ways", 2), ("gathered", 4))),
    ],
)
def test_kernels_of_tpus(form, K):
    """Half of the heads each way, in place; two heads cut by tokens, so that two cores share them; padded chunks.
    Gathered: two halves of the heads, or one stream."""
    n, T = 3, 3 * 2 * 140
    inputs, cotangents = arrays(T, B=1, H=4, K=K, bias=True, d=64)
    ids = (np.searchsorted([150, 600], np.arange(T), side="right")[None],) * 2
    out = on_pallas_ring(n, "zigzag", inputs, cotangents, ids, ring=form, q_chunk=128, k_chunk=128)
    assert_close(out, dense(inputs, cotangents, segment_ids=ids))


@pytest.mark.parametrize("form", FORMS)
def test_parts_too_short_to_cut(form):
    """Zigzag's parts of one token; one key head."""
    inputs, cotangents = arrays(3 * 2, K=1)
    assert_close(on_ring(3, "zigzag", inputs, cotangents, ring=form), dense(inputs, cotangents))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_summed_in_float32(form):
    """In bfloat16 on eight devices, errors are those of one device."""
    inputs, cotangents = rounded(*arrays(1024, B=1, H=4, K=4, d=64))
    exact, options = exact_attention(inputs, cotangents), dict(compile=jit_as_written)
    found = rounding_errors(on_ring(8, "zigzag", inputs, cotangents, ring=form, **options), exact)
    limits = rounding_errors(on_ring(1, "contiguous", inputs, cotangents, **options), exact)
    assert all(found[name] <= 1.05 * limits[name] for name in found), (found, limits)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_gathered_pairs_are_those_that_the_mask_leaves(n, layout):
    """Of every rank, by brute force over positions: no visible pair is missing, none is listed twice, none is empty."""
    T, chunk = 12, 3
    at = layouts.permutation(layout, n * T, n).reshape(n, T)
    axis = cut_axis(T, layouts.PARTS[layout], chunk)
    for rank in range(n):
        work = make_gathered_work_list(layout, True, axis, axis, jnp.int32(rank), n)
        seen = np.zeros((T, n * T), int)
        for (pairs, length), masked in ((work.unmasked, False), (work.masked, True)):
            for q, k, offset in list(zip(*(np.asarray(x) for x in pairs), strict=True))[: int(length)]:
                q0, k0 = work.q_chunks.start[q], work.k_chunks.start[k]
                row, column = np.arange(chunk)[:, None], np.arange(chunk)
                visible = row + offset >= column if masked else np.ones((chunk, chunk), bool)
                assert visible.any()
                seen[q0 : q0 + chunk, k0 : k0 + chunk] += visible
        expected = (at[rank][:, None] >= at.reshape(-1)).astype(int)
        expected[:, rank * T : (rank + 1) * T] = 0  # the rank's own block is another
        assert (seen == expected).all()


def test_what_is_refused(as_for_users):
    def attend(x, **options):
        run = jax.shard_map(
            lambda x: ring_attention(x, x, x, axis_name="sp", **options),
            mesh=ring_mesh(2),
            in_specs=P(None, "sp"),
            out_specs=P(None, "sp"),
        )
        return jax.eval_shape(run, x)

    three = jax.ShapeDtypeStruct((1, 16, 3, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="unknown ring 'sideways'; known forms: one_way, both_ways, gathered"):
        attend(three, ring="sideways")
    with pytest.raises(ValueError, match=r"a device has 3; kernel='xla' can cut the tokens instead.*ring='one_way'"):
        attend(three, ring="both_ways", kernel="cudnn")
