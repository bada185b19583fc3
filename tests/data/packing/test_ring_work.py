"""Work of packed documents on a ring: counted token by token, and what layouts and buckets make of it."""

import itertools

import numpy as np
import pytest

from benchmarks.packing import ON_RINGS, by_document, drawn
from ringformer.data.packing.ring_balance import balances, batches_of, in_buckets, segments, sequences_of
from ringformer.data.packing.ring_work import KERNEL_SHARES, in_rings, kernel_share, mean, overall, ring_work
from ringformer.ops.layouts import PARTS, permutation
from ringformer.ops.work_list import cut_axis
from tests.helpers import packed_segments


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("documents", [1, 3, 9])
def test_pairs_are_those_with_a_visible_token(layout, documents):
    """By brute force over the pairs of tokens in each pair of chunks; ranges of ids decide, as in the op."""
    ranks, T, chunk = 4, 32, 8
    ids = packed_segments(3, 1, ranks * T, documents)[0] if documents > 1 else np.zeros(ranks * T, int)
    places = permutation(layout, ranks * T, ranks).reshape(ranks, T)
    starts = cut_axis(T, PARTS[layout], chunk).start
    by_hop = np.zeros((ranks, ranks), int)
    for hop, rank, q, k in itertools.product(range(ranks), range(ranks), starts, starts):
        q_at, k_at = places[rank][q : q + chunk], places[(rank - hop) % ranks][k : k + chunk]
        q_ids, k_ids = ids[q_at], ids[k_at]
        shared = q_ids.min() <= k_ids.max() and k_ids.min() <= q_ids.max()
        by_hop[hop, rank] += chunk**2 * (shared and (q_at[:, None] >= k_at).any())
    work = ring_work(ids, layout, ranks, chunk)
    same = (ids[:, None] == ids) & np.tri(len(ids), dtype=bool)
    assert work.visible == same.sum() and work.computed == by_hop.sum() and work.slowest == by_hop.max(axis=1).sum()
    assert work.product == pytest.approx(work.balance * work.excess)


def test_rows_of_a_device_share_their_pairs():
    """A pair of chunks is computed for all rows if one of them needs it; chunks of keys have a size of their own."""
    ranks, T, chunk = 4, 32, (8, 4)
    rows = np.stack([packed_segments(seed, 1, ranks * T, 5)[0] for seed in (3, 4)])
    both = ring_work(rows, "zigzag", ranks, chunk)
    alone = [ring_work(row, "zigzag", ranks, chunk) for row in rows]
    places = permutation("zigzag", ranks * T, ranks).reshape(ranks, T)
    q_starts, k_starts = (cut_axis(T, 2, size).start for size in chunk)
    computed = 0
    for rank, origin, q, k in itertools.product(range(ranks), range(ranks), q_starts, k_starts):
        q_at, k_at = places[rank][q : q + 8], places[origin][k : k + 4]
        shared = [row[q_at].min() <= row[k_at].max() and row[k_at].min() <= row[q_at].max() for row in rows]
        computed += 32 * (any(shared) and bool((q_at[:, None] >= k_at).any()))
    assert both.computed == computed > max(work.computed for work in alone)
    assert both.visible == np.mean([work.visible for work in alone])


def test_gathered_keys_are_waited_for_once():
    ids = packed_segments(3, 1, 128, 5)[0]
    hops, gathered = (ring_work(ids, "zigzag", 4, 8, gathered=gathered) for gathered in (False, True))
    assert gathered.by_hop.shape == (1, 2) and gathered.by_hop[0, 0] == hops.by_hop[0, 0]
    assert gathered.computed == hops.computed and gathered.slowest < hops.slowest


def test_rings_of_one_wait_for_the_slowest():
    ids = np.concatenate([np.zeros(64, int), 1 + np.repeat(np.arange(8), 8)])
    work = in_rings(ids, "zigzag", 2, 2, 8)
    alone = ring_work(np.zeros(64, int), "zigzag", 1, 8)
    assert work.slowest == alone.slowest and work.balance > 1.5 and work.ranks == 2


@pytest.mark.parametrize(
    ("name", "layout", "most", "without"),
    [
        ("8 equal documents, 512K on 32", "zigzag", 1.1, 1.45),
        ("32 equal documents, 512K on 32", "zigzag", 1.1, 1.5),
        ("log-normal around 16K, 512K on 32", "striped", 2.0, 2.5),
        ("log-normal around 16K, 512K on 8", "striped", 1.3, 1.35),
    ],
)
def test_buckets_balance_documents(name, layout, most, without):
    """At chunks of 1024; without buckets the better of two layouts is that far away."""
    kind, size, seq_len, ranks = ON_RINGS[name]
    lengths = drawn(kind, size, seq_len)
    batches = batches_of(lengths, seq_len, ranks.bit_length() - 1)
    assert overall(in_buckets(batches, ranks, layout, 1024)).product <= most
    rows = [segments(row, seq_len) for row in sequences_of(lengths, seq_len)]
    for other in ("zigzag", "striped"):
        assert mean([ring_work(row, other, ranks, 1024) for row in rows]).product >= without


def test_most_chats_need_no_ring():
    kind, size, seq_len, _ = ON_RINGS["chats of 1.2K, 128K on 8"]
    batches = batches_of(drawn(kind, size, seq_len), seq_len, 3)
    assert batches[3][0] >= 0.8 and sum(share for share, _ in batches.values()) == pytest.approx(1)


def test_equal_documents_cut_for_all_ranks():
    """What is counted and not built: a rank has a low and a high piece of every document."""
    work = by_document(np.full(8, 2**13), 8, 256)
    assert 1 <= work.product <= 1.1


def test_every_way_is_counted_for_a_store():
    counted = balances(np.full(64, 512), 4096, 8)
    assert {(x.layout, x.buckets) for x in counted} == {(a, b) for a in ("zigzag", "striped") for b in (0, 3)}
    assert min(counted, key=lambda x: x.work.product).buckets == 3
    assert {x.chunk for x in counted} == {512, 256} and {x.chunk for x in counted if x.layout == "zigzag"} == {256}
    odd = balances(np.full(64, 512), 3 * 512 * 2, 3)
    assert {x.buckets for x in odd} == {0}
    assert all(x.work.product >= 1 for x in balances(np.array([1, 2, 3, 5, 16, 16, 40]), 16, 8))


def test_documents_longer_than_a_sequence_are_cut():
    """One of two hundred sequences is as two hundred documents of one each."""
    long, short = (balances(lengths, 1024, 8) for lengths in (np.array([200 * 1024]), np.full(200, 1024)))
    assert [x.work for x in long] == [x.work for x in short]


@pytest.mark.parametrize(
    ("ranks", "seq_len", "message"),
    [
        (8, 100, "sequence length 100 is not divisible by 16"),
        (10**6, 2 * 10**6, "a ring of 1000000 ranks for 2000000 tokens: give 1 to 256 ranks"),
        (8, -16, "a ring of 8 ranks for -16 tokens"),
    ],
)
def test_rings_that_are_not_counted(ranks, seq_len, message):
    with pytest.raises(ValueError, match=message):
        balances(np.full(64, 5), seq_len, ranks)


def test_shares_of_chunks_of_any_size():
    assert kernel_share(1024) == KERNEL_SHARES[1024] and kernel_share(4096) == KERNEL_SHARES[2048]
    assert KERNEL_SHARES[512] < kernel_share(768) < KERNEL_SHARES[1024]
    assert kernel_share(128) == KERNEL_SHARES[256] / 2
