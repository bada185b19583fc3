"""Buckets: batches by the length of their longest document, in pieces that no document crosses."""

import itertools
from collections import Counter

import numpy as np
import pytest

from ringformer.data import Loader
from ringformer.data.packing.bin_packing import pack
from ringformer.data.packing.buckets import LengthBuckets, deal
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.ring_work import mean, ring_work
from ringformer.ops.layouts import permutation
from tests.data.packing_samples import SEED, build

OPTIONS = PackingOptions(packing="whole", buckets=3)
T, ROWS = 64, 2
LENGTHS = [1, 2, 3, 4, 8, 8, 8, 8, 8, 15, 16, 15, 16, 31, 30, 60, 64, 60] * 8 + [41, 200]


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "mask"])
def store(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS, request.param)


def bucket_of(length):
    """The most halvings of 64 that leave room for a document."""
    return min(3, max(0, int(np.log2(64 / length)))) if length <= 64 else 0


def test_a_batch_has_documents_of_one_bucket_and_pieces_cut_none(store):
    packed, lengths, seen = LengthBuckets(store, T, SEED, OPTIONS, batch_size=ROWS), np.diff(store.offsets), Counter()
    of_bucket = {k: set() for k in range(4)}
    for step in range(40):
        k = packed.halvings(step)
        for row in range(ROWS):
            _, documents = packed.documents_of(step * ROWS + row)
            buckets = {bucket_of(lengths[d]) for d in documents}
            assert min(buckets) >= k  # shorter ones fill the room beside
            of_bucket[k] |= buckets
            batch = packed.read(step * ROWS + row, np.arange(T))
            assert (np.diff(batch.segment_ids) >= 0).all()
            for a, b in itertools.pairwise(np.split(batch.segment_ids, 2**k)):
                assert a[-1] < b[0]
            seen.update(documents.tolist())
    assert sum(map(bool, of_bucket.values())) >= 3
    assert seen.keys() == set(range(len(lengths)))


def test_tokens_are_those_of_the_documents(store):
    """Every piece of text is a run of the store, with its targets, its mask and its positions from 0."""
    packed = LengthBuckets(store, T, SEED, OPTIONS, batch_size=ROWS)
    tokens, starts = np.asarray(store.tokens), {int(x) for x in store.offsets[:-1]}
    for index in range(24):
        batch, (_, documents) = packed.read(index, np.arange(T)), packed.documents_of(index)
        texts = [np.flatnonzero(batch.segment_ids == i) for i in np.unique(batch.segment_ids)]
        texts = [places for places in texts if not batch.ends[places[0]] or len(places) > 1]
        for document, places in zip([d for d in documents if np.diff(store.offsets)[d] > 1], texts, strict=False):
            begin = int(store.offsets[document])
            assert begin in starts and (batch.positions[places] == np.arange(len(places))).all()
            if len(places) == store.offsets[document + 1] - begin:
                assert (batch.tokens[places] == tokens[begin : begin + len(places)]).all()
                assert (batch.targets[places[:-1]] == tokens[begin + 1 : begin + len(places)]).all()
                assert not batch.mask[places[-1]] and batch.ends[places[-1]]


def test_a_sequence_is_the_same_on_every_ring_and_in_any_order_of_reading(store):
    """Only the order of its columns is another: that of the rings which the ranks are cut into."""
    loaders = {
        n: Loader(store, batch_size=ROWS, seq_len=T, seed=SEED, layout="zigzag", ring_size=n, packing=OPTIONS)
        for n in (1, 2, 8)
    }
    for step in reversed(range(12)):
        k, expected = loaders[1].sequences.halvings(step), None
        for n, loader in loaders.items():
            rings = loader.rings(step)
            assert rings == min(2**k, n)
            back = np.argsort(permutation("zigzag", T, n, rings))
            batch = [field[:, back] for field in loader.read(step) if field is not None]
            expected = expected or batch
            for field, e in zip(batch, expected, strict=True):
                np.testing.assert_array_equal(field, e)
            columns = np.arange(T) % 3 == 1
            part, every = loader.read(step, slice(1, 2), columns), loader.read(step)
            np.testing.assert_array_equal(part.tokens, every.tokens[1:, columns])


def test_buckets_take_turns_by_their_batches(store):
    """In the long run every document occurs as often as any other, to a thousandth of the batches."""
    packed = LengthBuckets(store, T, SEED, OPTIONS, batch_size=1)
    seen, steps = Counter(), 600
    for step in range(steps):
        seen.update(packed.documents_of(step)[1].tolist())
    seen = {d: n for d, n in seen.items() if np.diff(store.offsets)[d] <= T}  # longer ones are in several sequences
    passes = packed.passes(steps)
    assert max(seen.values()) <= 1.15 * min(seen.values()) + 2
    assert passes == {str(store.path): pytest.approx(np.mean(list(seen.values())), rel=0.15)}


def test_the_line_on_buckets_counts_batches_by_their_rings(store):
    of_data = dict(batch_size=ROWS, seq_len=T, seed=SEED, layout="zigzag", packing=OPTIONS)
    loader, steps = Loader(store, ring_size=2, **of_data), 1000
    whole = sum(loader.rings(step) == 1 for step in range(steps)) / steps
    assert (
        loader.describe_buckets() == f"buckets: batches are {whole:.0%} on 1 ring of 2, {1 - whole:.0%} on 2 rings of 1"
    )


def test_a_run_knows_that_its_documents_leave_the_ring_unbalanced(tmp_path):
    """Eight and sixteen tokens on eight ranks; one rank alone, and text of one segment, have nothing to balance."""
    store = build(tmp_path / "short" / "s", [8, 16] * 160)
    of_data = dict(batch_size=ROWS, seq_len=T, seed=SEED, layout="zigzag")
    whole = PackingOptions(packing="whole")
    on_ring = Loader(store, ring_size=8, packing=whole, **of_data)
    line, sampled = on_ring.describe_balance(4), on_ring.work_by_rings(4)[1][1]
    assert line and "--ring_size=8 --seq_len=64" in line and str(store.path.parent) in line
    assert f"take {sampled.product:.1f} times its ideal" in line and sampled.product >= 1.5
    alone = Loader(store, ring_size=1, packing=whole, **of_data)
    rows = [ids for step in range(12) for ids in alone.read(step).segment_ids]
    work = mean([ring_work(ids, "zigzag", 8, 4) for ids in rows])
    assert sampled.product == pytest.approx(work.product, rel=0.1) and sampled.ranks == 8
    for ring_size, packing in ((1, whole), (8, PackingOptions(packed_attention="sequence"))):
        assert Loader(store, ring_size=ring_size, packing=packing, **of_data).describe_balance(4) is None


def test_what_buckets_cannot_halve(store):
    with pytest.raises(ValueError, match="halves a sequence 3 times: seq_len=60 is not divisible by so many twos"):
        LengthBuckets(store, 60, SEED, OPTIONS, batch_size=1)
    with pytest.raises(ValueError, match=r"data\.buckets=3 needs one store; the mixture has 2"):
        Loader(
            [(store, 1), (store, 2)],
            batch_size=2,
            seq_len=T,
            seed=0,
            layout="zigzag",
            ring_size=1,
            packing=OPTIONS,
        )


def test_short_documents_fill_the_room_beside_long_ones():
    """Log-normal lengths around a sixteenth of the sequence: every bucket is as full as whole documents can be, and all
    documents are dealt, once."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2**14), 1, 20_000), 64, 2**18).astype(np.int64)
    dealt = deal(lengths, 2**18, 4, 8, np.random.default_rng(1))
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.arange(len(lengths)))
    assert [bool(len(own)) for own in dealt] == [True, True, True, True, False]  # too few to fill shorter pieces
    for k, own in enumerate(dealt[:4]):
        length = 2**18 >> k
        bins = pack(lengths[own], length, np.random.default_rng(2))
        assert lengths[own].max() <= length and lengths[own].sum() / ((bins.max() + 1) * length) >= 0.94


def test_full_pieces_need_no_short_documents_and_few_documents_no_bucket():
    full = deal(np.full(400, 2**16), 2**19, 5, 8, np.random.default_rng(0))
    assert [len(own) for own in full] == [0, 0, 0, 400, 0, 0]
    rare = deal(np.array([2**16] * 400 + [100] * 3), 2**19, 5, 8, np.random.default_rng(0))
    assert [len(own) for own in rare] == [0, 0, 0, 403, 0, 0]


def test_a_rare_long_document_occurs_as_often_as_others(tmp_path):
    """Others join it, until they are a hundredth of the tokens."""
    store = build(tmp_path / "s", [128] + [8] * 8000)
    packed = LengthBuckets(store, 128, SEED, PackingOptions(packing="whole", buckets=3), batch_size=2)
    counts = np.zeros(8001)
    for index in range(1000):  # an epoch is of 501
        np.add.at(counts, packed.documents_of(index)[1], 1)
    assert packed.share_by_halvings[0] == pytest.approx(0.01, abs=0.005)
    assert 1 <= counts[0] <= 3 and counts[1:].mean() == pytest.approx(2, rel=0.1)
    with pytest.raises(ValueError, match="halves a sequence 1000000 times: seq_len=128 is not"):
        LengthBuckets(store, 128, SEED, PackingOptions(packing="whole", buckets=10**6), batch_size=2)


def test_balance_is_counted_over_all_stores_of_a_mixture(tmp_path):
    """Rows of a batch alternate between two stores, so that its first rows are of one of them."""
    stores = build(tmp_path / "long" / "s", [64] * 40), build(tmp_path / "short" / "s", [8] * 320)
    loader = Loader(
        [(store, 1) for store in stores],
        batch_size=2,
        seq_len=T,
        seed=SEED,
        layout="zigzag",
        ring_size=8,
        packing=PackingOptions(packing="whole"),
    )
    work = loader.work_by_rings(4)[1][1]
    assert len(np.unique(work.by_hop.sum(axis=1))) == 2
