"""Batches against a reference that puts whole documents end to end; every part read alone, and no more of it."""

import itertools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ringformer.data import Batch, ByteTokenizer, Document, Loader, PackedSequences, TokenStore, build_stores
from ringformer.ops.layouts import permutation

LENGTHS = (*([1, 2, 3, 4, 6, 8, 12, 41] * 3), 200, 15, 16, 17)
"""Tokens of each document with its end token: 1 is an end token alone."""

SEED = 7
MODES = ["document", "sequence"]
LAYOUTS = [("contiguous", 1), ("contiguous", 4), ("striped", 4), ("zigzag", 4), ("zigzag", 2)]


class Lengths(ByteTokenizer):
    """Makes text "n" n random tokens."""

    def encode_batch(self, texts):
        rng = np.random.default_rng(0)
        return [rng.integers(0, 256, int(text)) for text in texts]


def build(path, lengths, masked=False):
    documents = [Document(str(n - 1), "d") for n in lengths]
    store, _ = build_stores(path, documents, Lengths(), held_out=0)
    if masked:
        trained = np.random.default_rng(1).integers(0, 2, len(store.tokens)).astype(np.uint8)
        trained.tofile(store.path / "mask.bin")
    return TokenStore(store.path)


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "mask"])
def store(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS, request.param)


def reference(store, seq_len, epoch, seed=SEED, packed_attention="document"):
    """All sequences of an epoch, token by token, from whole documents put end to end, cut and permuted."""
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    stream = []
    for document in rng.permutation(len(store.offsets) - 1):
        for place in range(store.offsets[document], store.offsets[document + 1]):
            stream.append((document, int(store.tokens[place]), store.mask is None or bool(store.mask[place])))
    sequences = []
    while len(stream) >= seq_len + 1:
        rows, position, segment = [], 0, 1
        for (document, token, _), (next_document, target, trained) in itertools.pairwise(stream[: seq_len + 1]):
            ends = next_document != document
            rows.append((token, target, position, segment, not ends and trained, ends))
            position, segment = (0, segment + 1) if ends else (position + 1, segment)
        sequence = Batch(*map(np.array, zip(*rows, strict=True)))
        if packed_attention == "sequence":
            sequence = sequence._replace(positions=np.array(range(seq_len)), segment_ids=None)
        sequences.append(sequence)
        stream = stream[seq_len:]
    return [sequences[piece] for piece in rng.permutation(len(sequences))]


def at(batch, index):
    """The elements at `index` of every field."""
    return [None if field is None else field[index] for field in batch]


def assert_equal(actual, expected):
    for field, a, b in zip(Batch._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), field
        np.testing.assert_array_equal(a, b, err_msg=field)


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 64, 100, sum(LENGTHS) - 1])
def test_sequences_equal_the_reference(store, seq_len, packed_attention):
    packed = PackedSequences(store, seq_len, SEED, packed_attention=packed_attention)
    assert packed.has_segments == (packed_attention == "document")
    for epoch in range(2):
        expected = reference(store, seq_len, epoch, packed_attention=packed_attention)
        assert len(expected) == packed.per_epoch
        for row, sequence in enumerate(expected):
            actual = packed.read(epoch * packed.per_epoch + row, np.arange(seq_len))
            assert_equal(actual, sequence)
    assert [field.dtype for field in actual if field is not None] == [np.int32] * (3 + packed.has_segments) + [bool] * 2


@pytest.mark.parametrize("packed_attention", MODES)
def test_positions_are_read_in_any_order(store, packed_attention):
    packed = PackedSequences(store, 100, SEED, packed_attention=packed_attention)
    (expected, *_) = reference(store, 100, 0, packed_attention=packed_attention)
    rng = np.random.default_rng(2)
    for positions in (rng.permutation(100), rng.integers(0, 100, 30), np.array([99]), np.arange(100)[::-1]):
        assert_equal(packed.read(0, positions), at(expected, positions))
    assert_equal(packed.read(0, np.arange(0)), at(expected, slice(0)))


def test_epochs_and_seeds_shuffle_differently(store):
    def epoch(seed, epoch):
        packed = PackedSequences(store, 16, seed)
        rows = range(epoch * packed.per_epoch, (epoch + 1) * packed.per_epoch)
        return np.concatenate([packed.read(row, np.arange(16)).tokens for row in rows]).tobytes()

    assert len({epoch(seed, e) for seed in (0, 1) for e in (0, 1)}) == 4
    assert epoch(1, 0) == epoch(1, 0)


def test_the_shuffle_is_the_same_with_every_numpy(tmp_path):
    # A resumed run must meet the data order it began with, though NumPy promises none across versions.
    store = build(tmp_path / "s", range(1, 11))
    stream = PackedSequences(store, 54, seed=2**40).read(0, np.arange(54)).tokens
    assert np.diff(np.flatnonzero(np.append(256, stream) == 256)).tolist() == [5, 4, 3, 7, 6, 9, 10, 1, 2]
    packed = PackedSequences(store, 6, seed=2**40)
    pieces = [packed.read(row, np.arange(6)).tokens.tolist() for row in range(9)]
    assert [pieces.index(piece) for piece in stream.reshape(9, 6).tolist()] == [5, 4, 0, 6, 7, 8, 3, 2, 1]


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize(("layout", "ring_size"), LAYOUTS)
def test_a_batch_is_the_same_on_any_ring(store, layout, ring_size, packed_attention):
    loader = Loader(store, batch_size=4, seq_len=64, seed=SEED, layout=layout, ring_size=ring_size,
                    packed_attention=packed_attention)  # fmt: skip
    order = permutation(layout, 64, ring_size)
    sequences = [s for epoch in (0, 1) for s in reference(store, 64, epoch, packed_attention=packed_attention)]
    for step in (0, 1, 2):  # an epoch is 7 sequences: step 1 straddles two
        natural = at(loader.read(step), (slice(None), np.argsort(order)))
        rows = sequences[4 * step : 4 * step + 4]
        assert_equal(natural, [None if field[0] is None else np.stack(field) for field in zip(*rows, strict=True)])


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize(("layout", "ring_size"), LAYOUTS)
def test_a_part_equals_the_same_part_of_the_whole(store, layout, ring_size, packed_attention):
    loader = Loader(store, batch_size=4, seq_len=64, seed=SEED, layout=layout, ring_size=ring_size,
                    packed_attention=packed_attention)  # fmt: skip
    whole = loader.read(5)
    for rows, columns in itertools.product((slice(1, 3), slice(None)), (slice(0, 16), slice(48, 64), slice(5, 38))):
        assert_equal(loader.read(5, rows, columns), at(whole, (rows, columns)))


class Watched:
    """An array that counts the elements taken from it."""

    def __init__(self, array):
        self.array, self.itemsize, self.taken = array, array.itemsize, 0

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        found = self.array[index]
        self.taken += found.size
        return found


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
    assert store.mask.taken == local
    assert loader.sequences.bytes_read == 2 * (local + runs) + local


SPECS = [("dp", "sp"), (("dp", "tp"), None), (None, ("sp", "tp")), (), (None, "sp")]


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("layout", "ring_size"), LAYOUTS[2:4])
def test_a_sharded_batch_equals_the_plain_one(store, spec, layout, ring_size, packed_attention):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    loader = Loader(store, batch_size=4, seq_len=64, seed=SEED, layout=layout, ring_size=ring_size,
                    packed_attention=packed_attention)  # fmt: skip
    expected = loader.read(3)
    once = loader.sequences.bytes_read
    batch = loader.batch(3, sharding)
    assert_equal(batch, expected)
    assert all(isinstance(field, jax.Array) and field.sharding == sharding for field in jax.tree.leaves(batch))
    # Devices that hold the same part share one reading of it; the shards of a run's ends cost a token each.
    assert loader.sequences.bytes_read - once <= once + 4 * 4 * store.tokens.itemsize


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


def test_what_cannot_be_packed_is_refused(store):
    total = sum(LENGTHS)
    assert PackedSequences(store, total - 1, 0).per_epoch == 1
    with pytest.raises(ValueError, match=f"has {total} tokens, fewer than the {total + 1} of one sequence"):
        PackedSequences(store, total, 0)
    with pytest.raises(ValueError, match="seq_len=0 "):
        PackedSequences(store, 0, 0)
    with pytest.raises(ValueError, match="seed=-1 "):
        PackedSequences(store, 8, -1)
    with pytest.raises(ValueError, match="unknown packed_attention 'all'; known: document, sequence"):
        PackedSequences(store, 8, 0, packed_attention="all")
    packed = PackedSequences(store, 8, 0)
    with pytest.raises(ValueError, match="positions 7 to 8 are not in a sequence of 8"):
        packed.read(0, np.array([7, 8]))
    with pytest.raises(ValueError, match="sequence -1 "):
        packed.read(-1, np.arange(8))
    with pytest.raises(ValueError, match="batch_size=0 "):
        Loader(store, batch_size=0, seq_len=8, seed=0, layout="contiguous", ring_size=1)
    with pytest.raises(ValueError, match=r"sequence length 60 is not divisible by 8"):
        Loader(store, batch_size=1, seq_len=60, seed=0, layout="zigzag", ring_size=4)


def test_a_store_with_a_document_of_no_tokens_is_refused(tmp_path):
    store = build(tmp_path / "s", [5, 5, 5])
    np.save(store.path / "offsets.npy", np.array([0, 5, 5, 15]))
    with pytest.raises(ValueError, match="has documents without a token"):
        PackedSequences(TokenStore(store.path), 4, 0)
