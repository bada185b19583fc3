"""The order in which kernels walk pairs: every pair once, visits without a gap, nothing after the length."""

import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.kernels import pair_table
from ringformer.ops.kernels.pair_table import pair_tables
from ringformer.ops.segment_pairs import live_pairs, uncut_pairs
from ringformer.ops.work_list import ChunkPairs, PairList, cut_axis, make_work_list

FILLER = 50


def work_list(layout, earlier):
    """The last chunk of keys of a part has 78 of them, and 50 that fill it up."""
    parts = 2 if layout == "zigzag" else 1
    return make_work_list(layout, True, cut_axis(1024, parts, 128), cut_axis(1024, parts, 128, FILLER), earlier)


def wanted(work):
    """The pairs of a list: {(q, k): (offset, the keys used if it needs a mask, else 0)}."""
    per_part = len(work.k_chunks.part) // (work.k_chunks.part[-1] + 1)
    lists = ((work.unmasked, 0), (work.masked, 1))
    return {
        (int(q), int(k)): (int(offset), masked * (128 - FILLER if (k + 1) % per_part == 0 else 128))
        for (pairs, length), masked in lists
        for q, k, offset in list(zip(*map(np.asarray, pairs), strict=True))[: int(length)]
    }


@pytest.mark.parametrize("by", ["q", "k"])
@pytest.mark.parametrize("earlier", [None, True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("most", [2**15, 7])
def test_every_pair_once_in_order(layout, earlier, by, most, monkeypatch):
    """Also of a list that is chosen when the program runs, and whose length is data; and of one that is cut."""
    monkeypatch.setattr(pair_table, "MOST_PAIRS", most)
    work = work_list(layout, None if earlier is None else jnp.asarray(earlier))
    tables = pair_tables(work, by)
    found, major = {}, []
    for table in tables:
        pairs = in_order(table, by)
        found |= pairs
        major += [q if by == "q" else k for q, k in pairs]
    assert found == wanted(work) and len(major) == len(found) and major == sorted(major)
    assert len(tables) == -(-len(tables[0].columns[0]) // most) if most > 7 else len(tables) > 1
    total = [len(pairs.q) for pairs, _ in (work.unmasked, work.masked)]
    assert [sum(table.most[i] for table in tables) for i in range(2)] == total
    assert sum(table.share for table in tables) == pytest.approx(1)


def in_order(table, by):
    """The pairs of a table, whose visits are without a gap: {(q, k): (offset, used)}."""
    length = int(table.length)
    q, k, offset, used, visit, following = (np.asarray(column)[:length] for column in table.columns)
    found = dict(zip(zip(q.tolist(), k.tolist(), strict=True), zip(offset, used, strict=True), strict=True))
    assert len(found) == length
    assert (np.diff(visit) == (np.diff(q) != 0)).all() and (length == 0 or visit[0] == 0)
    for place in range(length):
        later = [i for i in range(place + 1, length) if visit[i] > visit[place]]
        assert following[place] >= length if not later else following[place] == later[0]
    return found


def test_pairs_without_a_common_segment_are_left_out():
    work = work_list("contiguous", None)
    live = tuple(jnp.arange(len(pairs.q)) % 2 == 0 for pairs, _ in (work.unmasked, work.masked))
    (table,) = pair_tables(work, "q", live)
    assert int(table.length) == sum(int(x.sum()) for x in live)
    used = np.asarray(table.columns[3])[: int(table.length)]
    assert (used > 0).sum() == int(live[1].sum())


def test_only_pairs_within_one_document_go_without_a_comparison_of_ids():
    """Of two rows, with boundaries at tokens 300 and 640 and at 700: a pair is whole if it is in every row."""
    tokens = np.arange(1024)
    ids = np.stack([(tokens >= 300) * 1 + (tokens >= 640), (tokens >= 700) * 7])
    work = work_list("contiguous", None)
    on_device = jnp.asarray(ids)
    live = live_pairs(on_device, on_device, work)
    uncut = uncut_pairs(on_device, on_device, work)
    (table,) = pair_tables(work, "q", live, uncut)
    chunks = [[set(row[128 * i : 128 * i + 128]) for row in ids] for i in range(8)]
    causal = wanted(work)
    expected = {
        (i, j): used or 128 * any(len(a | b) > 1 for a, b in zip(chunks[i], chunks[j], strict=True))
        for (i, j), (_, used) in causal.items()
        if any(a & b for a, b in zip(chunks[i], chunks[j], strict=True))
    }
    assert {pair: int(used) for pair, (_, used) in in_order(table, "q").items()} == expected
    assert 0 in (whole := list(expected.values())) and 128 in [x for (i, j), x in expected.items() if i > j], whole


def test_a_mask_that_leaves_nothing_has_no_table():
    chunks = cut_axis(256, 1, 128)
    work = make_work_list("contiguous", True, chunks, chunks, None)
    nothing = PairList(ChunkPairs(*([np.zeros(0, np.int32)] * 3)), 0)
    assert not pair_tables(work._replace(unmasked=nothing, masked=nothing), "q")
