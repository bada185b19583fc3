"""The ring with cuDNN's calls, emulated on the CPU in the numbers that they round to, against dense attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.kernels import cudnn_calls
from ringformer.ops.kernels.block_kernels import check_head_size, check_kernel
from ringformer.ops.ring_attention import ring_attention
from tests.helpers import errors, ring_mesh
from tests.ops.kernels.cudnn_emulation import emulated
from tests.ops.rings import LAYOUTS, arrays, dense, on_ring

__all__ = ["emulated"]


def rounded(inputs, dtype=jnp.bfloat16):
    return {name: np.asarray(x, dtype) for name, x in inputs.items()}


def as_float32(arrays):
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


def assert_as_good_as_dense(found, inputs, cotangents, factor=2.0, **options):
    """Of each array: the error is at most `factor` times that of dense attention of the same rounded inputs."""
    half = rounded(inputs)
    truth = dense(as_float32(half), cotangents, **options)
    limits = errors(as_float32(dense(half, cotangents, **options)), truth)
    actual = errors(as_float32(found), truth)
    # lse leaves in float32, computed of float32 logits
    assert all(actual[name] <= max(factor * limits[name], 1e-5) for name in actual), (actual, limits)


@pytest.mark.usual("3-zigzag", "1-contiguous")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 3])
def test_plain_causal(layout, n, emulated):
    """GQA, shards of odd parts, a cotangent of o and one of lse."""
    inputs, cotangents = arrays(n * 2 * 33, d=16)
    found = on_ring(n, layout, rounded(inputs), cotangents, kernel="cudnn")
    assert_as_good_as_dense(found, inputs, cotangents)


def test_sinks_are_in_the_lse_that_the_backward_gets(emulated):
    """cuDNN knows no sinks; the ring's first state has them, and every call's p is over all of a row's weight."""
    inputs, cotangents = arrays(3 * 2 * 33, d=16, sinks=True)
    inputs["sinks"] += 2.0
    found = on_ring(3, "zigzag", rounded(inputs), cotangents, kernel="cudnn")
    assert_as_good_as_dense(found, inputs, cotangents)
    without = {name: x for name, x in inputs.items() if name != "sinks"}
    assert np.abs(as_float32(found)["o"] - dense(without, cotangents)["o"]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS[:2])])
def test_more_ranks_make_no_larger_error(layout, emulated):
    T = 8 * 64
    inputs, cotangents = arrays(T, d=32, B=1)
    cotangents["dlse"] = np.zeros_like(cotangents["dlse"])
    truth = dense(as_float32(rounded(inputs)), cotangents)
    alone, ring = (
        errors(as_float32(on_ring(n, layout, rounded(inputs), cotangents, kernel="cudnn")), truth) for n in (1, 8)
    )
    assert_as_good_as_dense(on_ring(8, layout, rounded(inputs), cotangents, kernel="cudnn"), inputs, cotangents)
    assert all(ring[name] <= 1.3 * alone[name] for name in ("o", "dq", "dk", "dv")), (alone, ring)


def test_bidirectional_with_other_keys_than_queries_and_a_negative_scale(emulated):
    inputs, cotangents = arrays(2 * 30, 2 * 44, d=16)
    options = dict(causal=False, scale=-0.3)
    found = on_ring(2, "contiguous", rounded(inputs), cotangents, kernel="cudnn", **options)
    assert_as_good_as_dense(found, inputs, cotangents, **options)


def test_a_cotangent_of_lse_alone(emulated):
    """Values and o have no part in it; dv is 0."""
    inputs, cotangents = arrays(2 * 64, d=16)
    cotangents["do"] = np.zeros_like(cotangents["do"])
    found = on_ring(2, "zigzag", rounded(inputs), cotangents, kernel="cudnn")
    assert (as_float32(found)["dv"] == 0).all()
    assert_as_good_as_dense(found, inputs, cotangents)


def test_rows_that_see_nothing_do_not_overflow(emulated):
    """Striped, from a later rank: the first query sees none of keys whose logits are far beyond its own.

    Weights are almost all 0 or 1 here: what is left of dp - delta is the rounding of o.
    """
    inputs, cotangents = arrays(2 * 32, d=16)
    inputs["q"] *= 30
    found = on_ring(2, "striped", rounded(inputs), cotangents, kernel="cudnn")
    assert_as_good_as_dense(found, inputs, cotangents, factor=4.0)


CALLS = {
    "contiguous": [(64, 64, True), (64, 64, False)],
    "striped": [(64, 64, True), (64, 64, True)],
    "zigzag": [(64, 64, True), (32, 32, False), (32, 32, False)],
}
"""Queries and keys of a call, and whether it is causal: those of the own block, then of a visiting one."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calls_of_a_block(layout, emulated):
    inputs, _ = arrays(2 * 64, d=16)

    def gradients(q, k, v):
        o, pull = jax.vjp(lambda *x: ring_attention(*x, axis_name="sp", layout=layout, kernel="cudnn"), q, k, v)
        return pull(o)

    spec = jax.sharding.PartitionSpec(None, "sp")
    sharded = jax.shard_map(gradients, mesh=ring_mesh(2), in_specs=spec, out_specs=(spec,) * 3)
    jax.eval_shape(sharded, *rounded(inputs).values())
    own, visiting = CALLS[layout][:1], CALLS[layout][1:]
    calls = [(kind, q[1], k[1], causal) for kind, q, k, causal in emulated]
    forward = own + 2 * visiting  # of a ring of two, its loop over further hops has no turns, but is traced
    assert calls == [("forward", *c) for c in forward] + [("backward", *c) for c in visiting + own]


def test_what_cudnn_cannot_do_is_refused_by_name(as_for_users):
    def attend(dtype=jnp.bfloat16, d=64, **options):
        q = jnp.zeros((1, 16, 2, d), dtype)
        return ring_attention(q, q, q, axis_name=None, kernel="cudnn", **options)

    with pytest.raises(ValueError, match="'cudnn' computes bfloat16 and float16; kernel='xla' takes float32"):
        attend(jnp.float32)
    with pytest.raises(ValueError, match="multiples of 8, at most 256; kernel='xla' takes 100"):
        attend(d=100)
    with pytest.raises(NotImplementedError, match="'cudnn' runs on GPUs; kernel='xla' runs on cpu too"):
        attend()
    with pytest.raises(ValueError, match="'cudnn' runs on GPU; kernel='pallas' and 'xla' run on tpu"):
        check_kernel("cudnn", jnp.bfloat16, "tpu")
    check_head_size("cudnn", 256, capability=9)
    with pytest.raises(ValueError, match="at most 128 on GPUs of compute capability 8; kernel='xla' takes 256"):
        check_head_size("cudnn", 256, capability=8)


SUPPORTED = {(8, 64): True, (8, 128): True, (8, 136): False, (8, 256): False, (9, 128): True, (9, 256): True}
"""Head sizes by compute capability, forward and backward, with no mask, a causal mask or a padding mask (cuDNN 9
developer guide, "Scaled Dot Product Attention": head size at most 128, and 256 on Hopper, multiples of 8; padding masks
on Ampere and later). Packed layouts (ragged offsets) need Hopper, so none of our calls has one."""


@pytest.mark.parametrize(("capability", "d"), SUPPORTED)
def test_what_cudnn_supports(capability, d):
    if SUPPORTED[capability, d]:
        check_head_size("cudnn", d, capability)
    else:
        with pytest.raises(ValueError, match=f"on GPUs of compute capability {capability}; kernel='xla' takes {d}"):
            check_head_size("cudnn", d, capability)
    q = jnp.zeros((1, 8, 1, d), jnp.bfloat16)
    lengths = (jnp.ones(1, jnp.int32),) * 2
    for options in ({}, {"causal": True}, {"lengths": lengths}):
        traced = jax.jit(partial(cudnn_calls.forward, scale=1.0, **options)).trace(q, q, q)
        assert '"max_seg_per_batch":1,' in traced.lower(lowering_platforms=("cuda",)).as_text().replace("\\22", '"')


def test_second_derivatives_are_refused_by_name(emulated):
    q = jnp.ones((1, 16, 1, 8), jnp.bfloat16)

    def loss(q):
        return ring_attention(q, q, q, axis_name=None, kernel="cudnn").sum()

    with pytest.raises(NotImplementedError, match="kernel='cudnn' has no second derivative: kernel='xla' has"):
        jax.jvp(jax.grad(loss), (q,), (q,))


@pytest.mark.parametrize("size", [1e-7, 7e4])
def test_a_cotangent_of_lse_beyond_float16(size, emulated):
    """It is divided by a power of two for the call: float16 has neither 7e4 nor the digits of 1e-7."""
    inputs, cotangents = arrays(64, d=16)
    cotangents = {"do": np.zeros_like(cotangents["do"]), "dlse": np.full_like(cotangents["dlse"], size)}
    half = rounded({name: 0.05 * x for name, x in inputs.items()}, jnp.float16)
    found = on_ring(1, "contiguous", half, cotangents, kernel="cudnn")
    truth = dense(as_float32(half), cotangents)
    exact = {name: np.asarray(truth[name], np.float16).astype(np.float32) for name in ("dq", "dk")}
    limits = errors(exact, {name: truth[name] for name in exact})
    actual = errors({name: np.asarray(found[name], np.float32) for name in exact}, {n: truth[n] for n in exact})
    assert all(actual[name] <= 2 * limits[name] + 2e-3 for name in exact), (actual, limits)
