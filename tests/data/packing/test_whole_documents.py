"""Whole documents against a reference built piece by piece; every document once an epoch; no more read than asked."""

import itertools

import numpy as np
import pytest

from ringformer.data import Loader, WholeDocuments
from ringformer.data.packing.bin_packing import spread
from ringformer.data.packing.options import PackingOptions
from ringformer.ops.layouts import permutation
from tests.data.packing_samples import (
    LAYOUTS,
    LENGTHS,
    MODES,
    SEED,
    assert_equal,
    at,
    build,
    lengths_of,
    pieces_of,
    whole_reference,
)


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "mask"])
def store(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS, request.param)


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("seq_len", [1, 7, 64, 200, 1000])
def test_sequences_are_their_pieces(store, seq_len, packed_attention):
    packed = WholeDocuments(store, seq_len, SEED, PackingOptions(packed_attention=packed_attention), batch_size=2)
    index = 0
    for _ in range(2):
        covered = np.zeros(len(store.tokens), int)
        while covered.sum() < len(store.tokens):
            pieces = pieces_of(packed, index)
            for begin, length in pieces:
                covered[begin : begin + length] += 1
            batch = packed.read(index, np.arange(seq_len))
            assert_equal(batch, whole_reference(store, pieces, seq_len, packed_attention))
            index += 1
        np.testing.assert_array_equal(covered, 1)  # every epoch has every token once
    assert [field.dtype for field in batch[:6]] == [np.int32] * 4 + [np.bool_] * 2
    # No document that fits into a sequence is cut.
    whole = {(int(a), int(b - a)) for a, b in itertools.pairwise(store.offsets) if b - a <= seq_len}
    assert whole <= {piece for i in range(packed.per_epoch) for piece in pieces_of(packed, i)}


def test_a_long_document_is_cut_into_sequences(tmp_path):
    store = build(tmp_path / "s", [25])
    packed = WholeDocuments(store, 10, SEED, batch_size=1)
    assert packed.per_epoch == 3
    assert sorted(pieces_of(packed, i) for i in range(3)) == [[(0, 10)], [(10, 10)], [(20, 5)]]
    for i in range(3):
        batch, ((begin, length),) = packed.read(i, np.arange(10)), pieces_of(packed, i)
        assert batch.mask.tolist() == [begin + j < 24 for j in range(length)] + [False] * (10 - length)
        assert batch.positions.tolist() == [*range(length)] + [0] * (10 - length)


@pytest.mark.parametrize("packed_attention", MODES)
def test_padding_costs_one_token_each_and_ids_ascend(store, packed_attention):
    packed = WholeDocuments(store, 100, SEED, PackingOptions(packed_attention=packed_attention), batch_size=2)
    padded = 0
    for index in range(packed.per_epoch):
        batch, lengths = packed.read(index, np.arange(100)), lengths_of(packed, index)
        assert set(np.diff(batch.segment_ids).tolist()) <= {0, 1} and batch.segment_ids[0] == 1
        filled = lengths.sum()
        of_text = lengths if packed_attention == "document" else [filled]
        assert (np.bincount(batch.segment_ids)[1:] == [*of_text, *[1] * (100 - filled)]).all()
        assert not batch.mask[filled:].any() and not batch.positions[filled:].any()
        padded += 100 - filled
    assert padded


@pytest.mark.parametrize("packed_attention", MODES)
def test_an_index_means_the_same_in_any_order_of_reading(store, packed_attention):
    """Sequence i is a function of (seed, i): read backwards by a fresh object it is what it was."""
    everything = np.arange(64)
    options = PackingOptions(packed_attention=packed_attention)
    packed, fresh = (WholeDocuments(store, 64, SEED, options, batch_size=4) for _ in range(2))
    forward = [packed.read(i, everything) for i in range(4 * packed.per_epoch)]
    for i in reversed(range(len(forward))):
        assert_equal(fresh.read(i, everything), forward[i])
    rng = np.random.default_rng(2)
    for positions in (rng.permutation(64), rng.integers(0, 64, 30), np.array([63]), np.arange(64)[::-1]):
        assert_equal(fresh.read(1, positions), at(forward[1], positions))
    assert_equal(fresh.read(0, np.arange(0)), at(forward[0], slice(0)))


def test_epochs_and_seeds_shuffle_differently(store):
    def epoch(seed, epoch):
        packed = WholeDocuments(store, 64, seed, batch_size=1)
        packed.read(2 * packed.per_epoch + 2, np.arange(1))
        first, end = packed._first[epoch : epoch + 2]
        return np.concatenate([packed.read(row, np.arange(64)).tokens for row in range(first, end)]).tobytes()

    assert len({epoch(seed, e) for seed in (0, 1) for e in (0, 1)}) == 4
    assert epoch(1, 0) == epoch(1, 0)


def test_the_packing_is_the_same_with_every_numpy(tmp_path):
    store = build(tmp_path / "s", range(1, 11))
    packed = WholeDocuments(store, 16, seed=2**40, batch_size=2)
    assert [lengths_of(packed, i).tolist() for i in range(8)] == [
        [10, 6],
        [9, 2, 5],
        [7, 4, 1],
        [3, 8],
        [3, 8],
        [1, 7, 4],
        [9, 5, 2],
        [6, 10],
    ]


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize(("low", "high", "filled"), [(10, 100, 0.95), (50, 125, 0.8)], ids=["short", "long"])
def test_every_batch_of_a_run_is_even(tmp_path, low, high, filled, packed_attention):
    """Over epochs that end in the middle of a batch, read through the loader. The work of a row is that of its squares
    of segments: documents, or the whole text."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(low), np.log(high), 1510)).astype(int)
    loader = Loader(
        build(tmp_path / "s", lengths),
        batch_size=8,
        seq_len=128,
        seed=0,
        layout="zigzag",
        ring_size=2,
        packing=PackingOptions("whole", packed_attention),
    )
    (packed,) = loader.sequences.parts
    assert packed.per_epoch % 8
    steps = 3 * packed.per_epoch // 8
    document = packed_attention == "document"
    rows = [lengths_of(packed, i) for i in range(8 * steps)]
    work = np.array([(row**2).sum() if document else row.sum() ** 2 for row in rows]).reshape(-1, 8)
    spreads = spread(work.astype(float))
    assert np.median(spreads) < 0.05
    assert (spreads > 0.1).sum() <= 0.06 * steps
    batch = loader.read(3)
    padding = 128 - np.array([row.sum() for row in rows[24:32]])
    squares = [(np.bincount(ids) ** 2).sum() for ids in batch.segment_ids]
    np.testing.assert_array_equal(squares - padding, work[3])
    assert sum(lengths_of(packed, i).sum() for i in range(packed.per_epoch)) / (packed.per_epoch * 128) > filled


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize(("layout", "ring_size"), LAYOUTS)
def test_a_part_equals_the_same_part_of_the_whole(store, layout, ring_size, packed_attention):
    loader = Loader(
        store,
        batch_size=4,
        seq_len=64,
        seed=SEED,
        layout=layout,
        ring_size=ring_size,
        packing=PackingOptions("whole", packed_attention),
    )
    whole, order = loader.read(5), permutation(layout, 64, ring_size)
    rows = [loader.sequences.read(20 + row, np.arange(64)) for row in range(4)]
    assert_equal(at(whole, (slice(None), np.argsort(order))), [np.stack(f) for f in list(zip(*rows, strict=True))[:6]])
    for rows, columns in itertools.product((slice(1, 3), slice(None)), (slice(0, 16), slice(48, 64), slice(5, 38))):
        assert_equal(loader.read(5, rows, columns), at(whole, (rows, columns)))


def test_an_empty_batch_is_refused(store):
    with pytest.raises(ValueError, match="batch_size=0 "):
        WholeDocuments(store, 8, 0, batch_size=0)
