"""Batches: the same on any ring and mesh, every part read alone and no more of it, prefetched."""

import itertools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ringformer.data import Loader
from ringformer.data.packing.options import PackingOptions
from ringformer.ops.layouts import permutation
from tests.data.packing_samples import LAYOUTS, LENGTHS, MODES, SEED, Watched, assert_equal, at, build, stream_reference


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "mask"])
def store(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS, request.param)


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize(("layout", "ring_size"), LAYOUTS)
def test_a_batch_is_the_same_on_any_ring(store, layout, ring_size, packed_attention):
    loader = Loader(
        store,
        batch_size=4,
        seq_len=64,
        seed=SEED,
        layout=layout,
        ring_size=ring_size,
        packing=PackingOptions(packed_attention=packed_attention),
    )
    order = permutation(layout, 64, ring_size)
    sequences = [s for epoch in (0, 1) for s in stream_reference(store, 64, epoch, packed_attention=packed_attention)]
    for step in (0, 1, 2):  # an epoch is 7 sequences: step 1 straddles two
        natural = at(loader.read(step), (slice(None), np.argsort(order)))
        rows = sequences[4 * step : 4 * step + 4]
        assert_equal(natural, [None if field[0] is None else np.stack(field) for field in zip(*rows, strict=True)])


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
        packing=PackingOptions(packed_attention=packed_attention),
    )
    whole = loader.read(5)
    for rows, columns in itertools.product((slice(1, 3), slice(None)), (slice(0, 16), slice(48, 64), slice(5, 38))):
        assert_equal(loader.read(5, rows, columns), at(whole, (rows, columns)))


@pytest.mark.parametrize(
    ("layout", "runs"), [("contiguous", 1), ("zigzag", 2), ("striped", 25)], ids=["contiguous", "zigzag", "striped"]
)
def test_a_shard_reads_its_share(tmp_path, layout, runs):
    store = build(tmp_path / "s", LENGTHS, masked=True)
    store.tokens, store.mask = Watched(store.tokens), Watched(store.mask)
    loader = Loader(store, batch_size=2, seq_len=100, seed=SEED, layout=layout, ring_size=4 if runs != 2 else 5)
    local = 25 if runs != 2 else 20
    shard = slice(local, 2 * local)
    loader.read(1, slice(0, 1), shard)
    assert store.tokens.taken == local + runs
    assert store.mask.taken == local + runs
    assert loader.sequences.bytes_read == 3 * (local + runs)


SPECS = [("dp", "sp"), (("dp", "tp"), None), (None, ("sp", "tp")), (), (None, "sp")]


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("layout", "ring_size"), LAYOUTS[2:4])
def test_a_sharded_batch_equals_the_plain_one(store, spec, layout, ring_size, packed_attention):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    loader = Loader(
        store,
        batch_size=4,
        seq_len=64,
        seed=SEED,
        layout=layout,
        ring_size=ring_size,
        packing=PackingOptions(packed_attention=packed_attention),
    )
    expected = loader.read(3)
    once = loader.sequences.bytes_read
    batch = loader.batch(3, sharding)
    assert_equal(batch, expected)
    assert all(isinstance(field, jax.Array) and field.sharding == sharding for field in jax.tree.leaves(batch))
    # What a process's devices hold of a row, and be it the same, is read once and together.
    assert loader.sequences.bytes_read == 2 * once


def test_iterate_prefetches_one_batch(store, monkeypatch):
    loader = Loader(store, batch_size=2, seq_len=16, seed=SEED, layout="contiguous", ring_size=1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    asked, ready, batch = [], threading.Semaphore(0), loader.batch

    def recorded(step, sharding):
        made = batch(step, sharding)
        asked.append((step, threading.current_thread() is threading.main_thread()))
        ready.release()
        return made

    monkeypatch.setattr(loader, "batch", recorded)
    batches = loader.iterate(3, sharding)
    for step in (3, 4, 5):
        assert_equal(next(batches), loader.read(step))
    for _ in range(4):
        assert ready.acquire(timeout=10)
    assert asked == [(3, False), (4, False), (5, False), (6, False)]
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_an_error_of_the_thread_reaches_the_consumer(store, monkeypatch):
    loader = Loader(store, batch_size=2, seq_len=16, seed=SEED, layout="contiguous", ring_size=1)
    read = loader.read

    def failing(step, *part):
        if step == 2:
            raise OSError("the disk is gone")
        return read(step, *part)

    monkeypatch.setattr(loader, "read", failing)
    batches = loader.iterate(0, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert_equal(next(batches), read(0))
    assert_equal(next(batches), read(1))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_a_batch_that_cannot_be_is_refused(store):
    with pytest.raises(ValueError, match="batch_size=0 "):
        Loader(store, batch_size=0, seq_len=8, seed=0, layout="contiguous", ring_size=1)
    with pytest.raises(ValueError, match=r"sequence length 60 is not divisible by 8"):
        Loader(store, batch_size=1, seq_len=60, seed=0, layout="zigzag", ring_size=4)


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_what_a_batch_is_made_of(tmp_path, packing):
    """Every row's documents, of two stores in which each token is its document's number."""
    stores = [build(tmp_path / name, LENGTHS) for name in ("a", "b")]
    for store in stores:
        store.tokens = Watched(np.repeat(np.arange(len(LENGTHS)), np.diff(store.offsets)).astype(np.uint16))
    loader = Loader(
        [(stores[0], 2), (stores[1], 1)],
        batch_size=4,
        seq_len=64,
        seed=SEED,
        layout="contiguous",
        ring_size=1,
        packing=PackingOptions(packing=packing),
    )
    met = set()
    for step in range(6):
        batch, contents = loader.read(step), loader.contents(step)
        assert [c["sequence"] for c in contents] == list(range(4 * step, 4 * step + 4))
        for row, c in enumerate(contents):
            assert set(batch.tokens[row].tolist()) - {0} == set(c["documents"]) - {0}, "padding is 0, too"
            met.add(c["store"])
    assert met == {str(store.path) for store in stores}
