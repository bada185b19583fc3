"""Ring attention under `jax_enable_x64`, where Python numbers are 64-bit: float32 stays float32, with the values and
gradients of the dense oracle."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from ringformer.ops.ring_attention import ring_attention
from tests import dense
from tests.helpers import assert_close, packed_segments
from tests.ops.rings import arrays, on_ring

T = 32
IDS = packed_segments(7, 2, T, 4)

CASES = {
    "window and sinks": (2, "zigzag", dict(sinks=True), dict(window=9), {}),
    "documents, a bias and heads in pairs": (
        4,
        "zigzag",
        dict(bias=True),
        dict(segment_ids=(IDS, IDS)),
        dict(ulysses=2),
    ),
    "capped logits, gathered": (2, "contiguous", {}, dict(logit_softcap=2.0), dict(ring="gathered")),
}
"""Devices, layout, arrays, options of the op and of the oracle, options of the op alone."""


@pytest.mark.parametrize("case", CASES)
def test_float32_stays_float32(case):
    n, layout, more, options, of_ring = CASES[case]
    inputs, cotangents = arrays(T, **more)
    with jax.enable_x64(True):
        found = on_ring(n, layout, inputs, cotangents, q_chunk=4, k_chunk=4, **options, **of_ring)
    assert {str(x.dtype) for x in found.values()} == {"float32"}
    assert_close(found, dense.attention(inputs, cotangents, **options))


def test_tpu_kernels():
    """Mosaic has no 64-bit numbers, so the kernels are traced without x64."""
    inputs, cotangents = arrays(256, B=1, H=2, K=1, d=64)
    with jax.enable_x64(True), pltpu.force_tpu_interpret_mode():
        found = on_ring(1, "zigzag", inputs, cotangents, check_vma=False, kernel="pallas", q_chunk=128, k_chunk=128)
    assert {str(x.dtype) for x in found.values()} == {"float32"}
    assert_close(found, dense.attention(inputs, cotangents))


def test_tpu_kernels_refuse_ids_of_64_bits():
    with jax.enable_x64(True):
        q = jnp.zeros((1, 256, 2, 64), jnp.float32)
        ids = jnp.zeros((1, 256), jnp.int64)
        with pytest.raises(ValueError, match=r"segment ids of 32 bits; got int64: pass ids\.astype\(jnp\.int32\)"):
            ring_attention(q, q, q, axis_name=None, kernel="pallas", segment_ids=ids)
