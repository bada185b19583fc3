"""What every packing checks and measures: the store, the range of lengths, positions, bytes read."""

import itertools
from functools import partial

import numpy as np
import pytest

from ringformer.data import ByteTokenizer, DocumentStream, Loader, TokenStore, WholeDocuments
from ringformer.data.packing import sequences as sequences_module
from ringformer.data.packing.options import PackingOptions
from ringformer.data.stores.token_store import StoreWriter
from tests.data.packing_samples import LENGTHS, SEED, Watched, assert_equal, at, build

PACKINGS = pytest.mark.parametrize(
    "packed", [DocumentStream, partial(WholeDocuments, batch_size=1)], ids=["stream", "whole"]
)


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "mask"])
def store(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS, request.param)


@pytest.mark.parametrize("ring_size", [2, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_a_host_reads_its_share_and_two_tokens(tmp_path, packing, layout, ring_size):
    """In bytes, each host's columns of a sequence; a run of columns costs one target more."""
    store = build(tmp_path / "s", [300, 200, 12, 500, 4000, 700, 30, 90, 800], masked=True)
    store.tokens, store.mask = Watched(store.tokens), Watched(store.mask)
    local = 1024 // ring_size
    loader = Loader(
        store,
        batch_size=2,
        seq_len=1024,
        seed=SEED,
        layout=layout,
        ring_size=ring_size,
        packing=PackingOptions(packing),
    )
    size = store.tokens.itemsize + store.mask.itemsize
    for step, row, host in itertools.product(range(2), range(2), range(ring_size)):
        tokens, mask, before = store.tokens.taken, store.mask.taken, loader.sequences.bytes_read
        part = loader.read(step, slice(row, row + 1), slice(host * local, (host + 1) * local))
        read = loader.sequences.bytes_read - before
        assert read == (store.tokens.taken - tokens) * store.tokens.itemsize + (store.mask.taken - mask)
        assert read <= (local + 2) * size
        assert read >= part.mask.sum() * size


@PACKINGS
@pytest.mark.parametrize("most_runs", [1, 64], ids=["all between them", "run by run"])
def test_positions_are_read_in_any_order(store, packed, most_runs, monkeypatch):
    monkeypatch.setattr(sequences_module, "MOST_RUNS", most_runs)
    sequences, rng = packed(store, 64, SEED), np.random.default_rng(0)
    orders = [[], [63], [5, 5, 4, 6], [*range(30, 50), *range(20, 40)], range(63, -1, -1), rng.permutation(64)]
    for index in range(sequences.per_epoch):
        whole = sequences.read(index, np.arange(64))
        for order in orders:
            positions = np.array(order, np.int64)
            assert_equal(sequences.read(index, positions), at(whole, positions))


def test_lengths_choose_documents(store):
    store = TokenStore(store.path)
    for packing in ("stream", "whole"):
        loader = Loader(
            store,
            batch_size=1,
            seq_len=20,
            seed=SEED,
            layout="contiguous",
            ring_size=1,
            packing=PackingOptions(packing, min_length=6, max_length=16),
        )
        (sequences,) = loader.sequences.parts
        assert sorted(np.diff(store.offsets)[sequences.documents].tolist()) == [6, 6, 6, 8, 8, 8, 12, 12, 12, 15, 16]
        store.tokens = Watched(np.arange(len(store.tokens)))  # a token is its own place
        allowed = np.concatenate([store.tokens[slice(*store.offsets[i : i + 2])] for i in sequences.documents])
        batches = [sequences.read(index, np.arange(20)) for index in range(sequences.per_epoch)]
        held = [batch.tokens[batch.segment_ids <= batch.segment_ids[batch.mask].max()] for batch in batches]
        assert set(np.concatenate(held)) <= set(allowed)
    with pytest.raises(
        ValueError,
        match=r"none of the 28 documents of .* has min_length=42 to max_length=100 tokens: "
        r"27 are shorter, 1 longer .* 1 to 200",
    ):
        WholeDocuments(store, 20, SEED, PackingOptions(min_length=42, max_length=100), batch_size=1)
    with pytest.raises(ValueError, match="min_length=201 to max_length=any tokens: 28 are shorter, 0 longer"):
        WholeDocuments(store, 20, SEED, PackingOptions(min_length=201), batch_size=1)


@PACKINGS
def test_what_cannot_be_packed_is_refused(store, packed):
    with pytest.raises(ValueError, match="seq_len=0 "):
        packed(store, 0, 0)
    with pytest.raises(ValueError, match="seed=-1 "):
        packed(store, 8, -1)
    sequences = packed(store, 8, 0)
    with pytest.raises(ValueError, match="positions 7 to 8 are not in a sequence of 8"):
        sequences.read(0, np.array([7, 8]))
    with pytest.raises(ValueError, match="sequence -1 "):
        sequences.read(-1, np.arange(8))


@PACKINGS
def test_a_store_with_a_document_of_no_tokens_is_refused(tmp_path, packed):
    writer = StoreWriter(tmp_path / "s", ByteTokenizer(), {})
    for tokens in (5, 0, 10):
        writer.add(np.arange(tokens), None, tokens, b"")
    writer.finish(skipped_empty=0, settings={})
    with pytest.raises(ValueError, match="has documents without a token"):
        packed(TokenStore(tmp_path / "s"), 4, 0)
