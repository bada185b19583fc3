"""Arguments that do not fit are refused; of other dtypes than the op's own, they have a right answer or an error."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from ringformer.ops.argument_checks import as_bias, as_segment_ids
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.sharded_ring_attention import sharded_ring_attention
from tests import dense
from tests.helpers import assert_close, ring_mesh
from tests.ops.rings import B, arrays


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=(2, 8, 3, 8)), "3 query heads.*2 key heads"),
        (dict(k=(2, 8, 2, 4)), r"d=8.*\(2, 8, 2, 4\)"),
        (dict(k=(2, 6, 2, 8), v=(2, 6, 2, 8)), "T=8.*S=6.*causal=False"),
        (dict(bias=(2, 7)), r"\[2, 8\].*\(2, 7\)"),
        (dict(segment_ids=(2, 7)), r"\[2, 8\].*\(2, 7\)"),
        (dict(q_chunk=0), "q_chunk.*0"),
        (dict(layout="spiral"), "spiral"),
        (dict(q=(2, 7, 4, 8), k=(2, 7, 2, 8), v=(2, 7, 2, 8), layout="zigzag"), "7"),
        (dict(q=(8, 4, 8)), r"\(8, 4, 8\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_both_numbers(change, message, as_for_users):
    """Every ValueError names what it got and what it wanted."""
    shapes = dict(q=(2, 8, 4, 8), k=(2, 8, 2, 8), v=(2, 8, 2, 8)) | change
    call = {
        name: jnp.zeros(x, jnp.int32 if name == "segment_ids" else jnp.float32) if isinstance(x, tuple) else x
        for name, x in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        ring_attention(**call, axis_name=None)


@pytest.mark.parametrize(
    "argument, array",
    [
        ("bias", np.zeros((2, 7), np.float32)),
        ("bias", np.zeros((2, 8), np.int32)),
        ("segment_ids", np.zeros((2, 8), np.float32)),
        ("k", np.zeros((2, 8, 2, 4), np.float32)),
    ],
)
def test_signatures_are_checked_in_tests(argument, array):
    """The shapes and dtypes that a signature names hold wherever a test calls, inside transformations too."""
    q, k = np.zeros((2, 8, 4, 8), np.float32), np.zeros((2, 8, 2, 8), np.float32)

    def attend(array):
        return ring_attention(**dict(q=q, k=k, v=k) | {argument: array}, axis_name=None)

    for transformed in (attend, jax.jit(attend), partial(jax.eval_shape, attend)):
        with pytest.raises(jaxtyping.TypeCheckError, match=f"parameter '{argument}'"):
            transformed(array)


def test_mixed_dtypes_are_refused():
    """q, k and v share a dtype: a silent cast would hide which one the ring carries."""
    q, k = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        ring_attention(q, k, k, axis_name=None)


# --- segment ids ------------------------------------------------------------------------------------------------------

FAR = np.array([-(2**40), 5, 5 + 2**32, 2**62])
"""Ids of which two share their lower 32 bits, and whose order those do not keep."""


@pytest.mark.parametrize("x64", [False, True])
def test_64_bit_segment_ids_are_exact(x64):
    """Documents whose ids are equal in 32 bits do not see each other: numpy ids, and device ids where there are any."""
    inputs, _ = arrays(16)
    ids = np.repeat(FAR, [3, 5, 4, 4])[None].repeat(B, 0)
    expected = dict(o=dense.attention(inputs, segment_ids=(ids, ids))["o"])
    with jax.enable_x64(x64):
        given = jnp.asarray(ids) if x64 else ids
        alone = jax.jit(partial(ring_attention, axis_name=None, segment_ids=(given, ids), q_chunk=4, k_chunk=4))
        assert_close(dict(o=alone(**inputs)), expected)
        on_ring = partial(sharded_ring_attention, mesh=ring_mesh(2), segment_ids=given, q_chunk=4, k_chunk=4)
        assert_close(dict(o=on_ring(**inputs)), expected)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.uint16, np.int32, np.int64, np.uint32, np.uint64])
def test_ids_that_fit_become_int32(dtype):
    ids = np.array([[0, 0, 1, 1]], dtype)
    for out in as_segment_ids(ids):
        assert out.dtype == np.int32 and (out == ids).all()


def test_wide_ids_keep_equality_and_order_across_queries_and_keys():
    q_ids, k_ids = FAR[[3, 0, 1, 1]].reshape(2, 2), FAR[[2, 2, 0, 3, 1, 1]].reshape(2, 3)
    q, k = (x.ravel() for x in as_segment_ids((q_ids, k_ids)))
    for of_ids, of_ranks in ((np.equal, np.equal), (np.less, np.less)):
        assert (of_ids.outer(q_ids.ravel(), k_ids.ravel()) == of_ranks.outer(q, k)).all()


@pytest.mark.parametrize(
    "ids, message",
    [
        (np.zeros((1, 4), np.float32), "must be integers; got float32"),
        (
            (np.full((1, 4), 2**40), jnp.zeros((1, 4), jnp.int32)),
            "int64 and int32 do not fit in 32 bits.*renumber the",
        ),
        (jnp.zeros((1, 4), jnp.uint32), "uint32 and uint32 do not fit in 32 bits"),
    ],
)
def test_ids_without_an_exact_answer_are_refused(ids, message, as_for_users):
    q = np.zeros((1, 4, 1, 2), np.float32)
    with pytest.raises(ValueError, match=message):
        ring_attention(q, q, q, axis_name=None, segment_ids=ids)


# --- bias -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x64", [False, True])
def test_the_least_float64_as_a_mask_is_a_number_and_not_infinity(x64):
    """Rows that see only keys of such a bias attend to all of them alike, as with the least float32."""
    inputs, _ = arrays(16, bias=True)
    bias = np.where(np.arange(16) < 8, np.finfo(np.float64).min, 0.0) * np.ones((B, 1))
    expected = dense.attention(inputs | dict(bias=np.where(bias, np.finfo(np.float32).min, 0)), logits=np.float32)
    with jax.enable_x64(x64):
        out = sharded_ring_attention(**inputs | dict(bias=bias), mesh=ring_mesh(2), q_chunk=4, k_chunk=4)
        assert_close(dict(o=out), dict(o=expected["o"]))
        for given in [bias, jnp.asarray(bias)] if x64 else [bias]:
            assert as_bias(given).dtype == np.float32 and (as_bias(given)[:, :8] == np.finfo(np.float32).min).all()
    infinite = np.array([[-np.inf, np.inf, np.nan]])
    np.testing.assert_array_equal(as_bias(infinite), infinite.astype(np.float32))


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_a_boolean_mask_is_no_bias(dtype, as_for_users):
    q = np.zeros((1, 4, 1, 2), np.float32)
    with pytest.raises(ValueError, match=r"be float; got (bool|int32): convert a mask with jnp.where\(mask, 0.0, -jnp"):
        ring_attention(q, q, q, axis_name=None, bias=np.ones((1, 4), dtype))


def test_signed_and_unsigned_ids_of_64_bits_stay_apart():
    """numpy would make float64 of them, in which neighbours beyond 2^53 are one."""
    queries, keys = np.array([[2**60, 2**60 + 1]], np.uint64), np.array([[2**60, -1]], np.int64)
    a, b = as_segment_ids((queries, keys))
    assert a.tolist() == [[1, 2]] and b.tolist() == [[1, 0]]
    a, b = as_segment_ids((np.array([[2**63, 2**63 + 1]], np.uint64), keys))
    assert a.tolist() == [[2, 3]] and b.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": "no"}, "causal='no' must be True or False"),
        ({"q_chunk": True}, "q_chunk=True must be a whole number"),
        ({"batch_axes": "rows"}, "no axis 'rows' of batch_axes"),
        ({"batch_axes": ("sp",)}, "has the axis of the ring"),
        ({"ulysses": 3}, "ulysses=3 does not divide the 4 devices"),
        ({"k": np.zeros((2, 30, 2, 8), np.float32)}, r"\(2, 30, 2, 8\) and \(2, 32, 2, 8\)"),
    ],
)
def test_whole_arrays_are_refused_by_their_own_sizes(options, message, as_for_users):
    q, k = np.zeros((2, 32, 4, 8), np.float32), np.zeros((2, 32, 2, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        sharded_ring_attention(**dict(q=q, k=k, v=k) | options, mesh=ring_mesh(4))


def test_groups_of_devices_are_not_batched(as_for_users):
    """numpy's integers are whole numbers; vmap names the way round."""
    q = jnp.ones((1, 2, 32, 4, 8))

    def attend(q):
        return sharded_ring_attention(q, q, q, mesh=ring_mesh(4), ulysses=np.int64(2))

    assert attend(q[0]).shape == q[0].shape
    with pytest.raises(NotImplementedError, match=r"ulysses=2 under jax\.vmap.*Pass ulysses=1"):
        jax.vmap(attend)(q)
