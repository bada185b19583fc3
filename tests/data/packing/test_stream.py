"""The stream against a reference that puts whole documents end to end; read in any order, epoch after epoch."""

import numpy as np
import pytest

from ringformer.data import DocumentStream
from ringformer.data.packing.options import PackingOptions
from tests.data.packing_samples import LENGTHS, MODES, SEED, assert_equal, at, build, stream_reference


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "mask"])
def store(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS, request.param)


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 64, 100, sum(LENGTHS) - 1])
def test_sequences_equal_the_reference(store, seq_len, packed_attention):
    packed = DocumentStream(store, seq_len, SEED, PackingOptions(packed_attention=packed_attention))
    has_segments = packed_attention == "document"
    assert (packed.read(0, np.arange(seq_len)).segment_ids is not None) == has_segments
    for epoch in range(2):
        expected = stream_reference(store, seq_len, epoch, packed_attention=packed_attention)
        assert len(expected) == packed.per_epoch
        for row, sequence in enumerate(expected):
            actual = packed.read(epoch * packed.per_epoch + row, np.arange(seq_len))
            assert_equal(actual, sequence)
    assert [field.dtype for field in actual if field is not None] == [np.int32] * (3 + has_segments) + [bool] * 2


@pytest.mark.parametrize("packed_attention", MODES)
def test_positions_are_read_in_any_order(store, packed_attention):
    packed = DocumentStream(store, 100, SEED, PackingOptions(packed_attention=packed_attention))
    (expected, *_) = stream_reference(store, 100, 0, packed_attention=packed_attention)
    rng = np.random.default_rng(2)
    for positions in (rng.permutation(100), rng.integers(0, 100, 30), np.array([99]), np.arange(100)[::-1]):
        assert_equal(packed.read(0, positions), at(expected, positions))
    assert_equal(packed.read(0, np.arange(0)), at(expected, slice(0)))


def test_epochs_and_seeds_shuffle_differently(store):
    def epoch(seed, epoch):
        packed = DocumentStream(store, 16, seed)
        rows = range(epoch * packed.per_epoch, (epoch + 1) * packed.per_epoch)
        return np.concatenate([packed.read(row, np.arange(16)).tokens for row in rows]).tobytes()

    assert len({epoch(seed, e) for seed in (0, 1) for e in (0, 1)}) == 4
    assert epoch(1, 0) == epoch(1, 0)


def test_the_shuffle_is_the_same_with_every_numpy(tmp_path):
    # A resumed run must meet the data order it began with, though NumPy promises none across versions.
    store = build(tmp_path / "s", range(1, 11))
    stream = DocumentStream(store, 54, seed=2**40).read(0, np.arange(54)).tokens
    assert np.diff(np.flatnonzero(np.append(256, stream) == 256)).tolist() == [5, 4, 3, 7, 6, 9, 10, 1, 2]
    packed = DocumentStream(store, 6, seed=2**40)
    pieces = [packed.read(row, np.arange(6)).tokens.tolist() for row in range(9)]
    assert [pieces.index(piece) for piece in stream.reshape(9, 6).tolist()] == [5, 4, 0, 6, 7, 8, 3, 2, 1]


def test_a_store_shorter_than_a_sequence_is_refused(store):
    total = sum(LENGTHS)
    assert DocumentStream(store, total - 1, 0).per_epoch == 1
    with pytest.raises(ValueError, match=f"has {total} tokens, fewer than the {total + 1} of one sequence"):
        DocumentStream(store, total, 0)
