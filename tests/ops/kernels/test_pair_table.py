"""The order in which kernels walk pairs: every pair once, visits without a gap, nothing after the length."""

import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.kernels.pair_table import pair_table
from ringformer.ops.work_list import ChunkPairs, PairList, cut_axis, make_work_list


def work_list(layout, earlier):
    chunks = cut_axis(1024, 2 if layout == "zigzag" else 1, 128)
    return make_work_list(layout, True, chunks, chunks, earlier)


def wanted(work):
    """The pairs of a list: {(q, k): (offset, masked)}."""
    lists = ((work.unmasked, 0), (work.masked, 1))
    return {
        (int(q), int(k)): (int(offset), masked)
        for (pairs, length), masked in lists
        for q, k, offset in list(zip(*map(np.asarray, pairs), strict=True))[: int(length)]
    }


@pytest.mark.parametrize("by", ["q", "k"])
@pytest.mark.parametrize("earlier", [None, True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_every_pair_once_in_order(layout, earlier, by):
    """Also of a list that is chosen when the program runs, and whose length is data."""
    work = work_list(layout, None if earlier is None else jnp.asarray(earlier))
    table = pair_table(work, by)
    length = int(table.length)
    q, k, offset, masked, visit, following = (np.asarray(column)[:length] for column in table.columns)
    found = dict(zip(zip(q, k, strict=True), zip(offset, masked, strict=True), strict=True))
    assert found == wanted(work) and len(found) == length <= sum(table.most)
    major = q if by == "q" else k
    assert (np.diff(major) >= 0).all()
    assert (np.diff(visit) == (np.diff(q) != 0)).all() and (length == 0 or visit[0] == 0)
    for place in range(length):
        later = [i for i in range(place + 1, length) if visit[i] > visit[place]]
        assert following[place] >= length if not later else following[place] == later[0]


def test_pairs_without_a_common_segment_are_left_out():
    work = work_list("contiguous", None)
    live = tuple(jnp.arange(len(pairs.q)) % 2 == 0 for pairs, _ in (work.unmasked, work.masked))
    table = pair_table(work, "q", live)
    assert int(table.length) == sum(int(x.sum()) for x in live)
    masked = np.asarray(table.columns[3])[: int(table.length)]
    assert masked.sum() == int(live[1].sum())


def test_a_mask_that_leaves_nothing_has_no_table():
    chunks = cut_axis(256, 1, 128)
    work = make_work_list("contiguous", True, chunks, chunks, None)
    nothing = PairList(ChunkPairs(*([np.zeros(0, np.int32)] * 3)), 0)
    assert pair_table(work._replace(unmasked=nothing, masked=nothing), "q") is None
