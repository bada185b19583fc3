"""Mixtures: shares exact over windows, each part complete and in its own order, readable at any index."""

import numpy as np
import pytest

from ringformer.data import (
    Document,
    DocumentStream,
    Loader,
    Mixture,
    WholeDocuments,
    build_stores,
    open_mixture,
    parse_mixture,
)
from ringformer.data.packing.mixture import schedule
from ringformer.data.packing.options import PackingOptions
from ringformer.ops.layouts import permutation
from tests.data.packing_samples import (
    MODES,
    Lengths,
    assert_equal,
    at,
    build,
    pieces_of,
    stream_reference,
    whole_reference,
)

SHARES = [[7, 3], [1, 1], [1, 99], [5], [2, 3, 5], [1, 1, 1], [9, 4, 2, 1], [50, 17, 13, 11, 7, 2]]


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_any_window_has_its_share(shares):
    total, k = sum(shares), len(shares)
    order = np.tile(schedule(shares), 3)
    assert np.bincount(order[:total]).tolist() == shares
    bound = 1.0 if k <= 2 else 2 - 1 / (k - 1)
    for part, share in enumerate(shares):
        # Over all windows, the largest difference is that of two prefixes.
        ahead = np.concatenate([[0], np.cumsum(order == part)]) - share / total * np.arange(len(order) + 1)
        assert np.abs(ahead).max() < 1
        assert np.ptp(ahead) <= bound + 1e-9


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return build(folder / "a", range(3, 40)), build(folder / "b", range(30, 60), masked=True)


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize(
    "packed", [DocumentStream, lambda *a, **k: WholeDocuments(*a, batch_size=4, **k)], ids=["stream", "whole"]
)
def test_each_sequence_is_one_store_in_order(stores, packed, packed_attention):
    parts = [packed(store, 64, 5, PackingOptions(packed_attention=packed_attention)) for store in stores]
    mixture = Mixture(parts, [7, 3], seed=5)
    counts, everything = [0, 0], np.arange(64)
    for index in range(40):
        part, number = mixture.source(index)
        assert number == counts[part]
        counts[part] += 1
        assert_equal(mixture.read(index, everything), parts[part].read(number, everything))
    assert counts == [28, 12]
    assert mixture.bytes_read == sum(part.bytes_read for part in parts)
    first = [mixture.source(i) for i in range(mixture.per_epoch + 1)]
    per_epoch = [part.per_epoch for part in parts]
    assert all(number < per_epoch[part] for part, number in first[:-1])
    assert first[-1][1] == per_epoch[first[-1][0]]


def test_the_seed_says_where_the_period_begins(stores):
    parts = [DocumentStream(store, 64, 5) for store in stores]
    begins = {tuple(Mixture(parts, [7, 3], seed).source(i)[0] for i in range(10)) for seed in range(20)}
    assert len(begins) > 3


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_a_loader_mixes(stores, packing, packed_attention):
    """Token by token: each row is that of its store alone; with stream and sequence there are no segment ids."""
    loader = Loader(
        list(zip(stores, (7, 3), strict=True)),
        batch_size=10,
        seq_len=64,
        seed=1,
        layout="zigzag",
        ring_size=2,
        packing=PackingOptions(packing, packed_attention),
    )
    sources = [loader.sequences.source(i)[0] for i in range(30)]
    assert [sources[i : i + 10].count(0) for i in (0, 10, 20)] == [7, 7, 7]
    if packing == "whole":
        assert [part.batch_size for part in loader.sequences.parts] == [7, 3]
    order, batch = np.argsort(permutation("zigzag", 64, 2)), loader.read(2)
    assert (batch.segment_ids is None) == ((packing, packed_attention) == ("stream", "sequence"))
    for row in range(10):
        store, number = loader.sequences.source(20 + row)
        sequences = loader.sequences.parts[store]
        if packing == "whole":
            expected = whole_reference(stores[store], pieces_of(sequences, number), 64, packed_attention)
        else:
            epoch, number = divmod(number, sequences.per_epoch)
            expected = stream_reference(stores[store], 64, epoch, seed=1, packed_attention=packed_attention)[number]
        assert_equal(at(batch, (row, order)), expected)
    assert_equal(loader.read(2, slice(4, 6), slice(16, 48)), at(batch, (slice(4, 6), slice(16, 48))))
    a, b = (part.bytes_per_token for part in loader.sequences.parts)
    assert loader.sequences.bytes_per_token == pytest.approx(0.7 * a + 0.3 * b)


def test_parsing():
    assert parse_mixture("a/b:7, c:3") == [("a/b", 7), ("c", 3)]
    assert parse_mixture("a:0.7,b:0.3") == [("a", 7), ("b", 3)]
    assert parse_mixture("gs://x:10,b:5") == [("gs://x", 2), ("b", 1)]
    for text in ("a", "a:", "a:x", "a:0", "a:-1", "a:1,", ":3", ""):
        with pytest.raises(ValueError, match="is not STORE:WEIGHT"):
            parse_mixture(text)
    with pytest.raises(ValueError, match="names a twice"):
        parse_mixture("a:1,b:2,a:3")
    with pytest.raises(ValueError, match="a period of 100001 sequences; round"):
        parse_mixture("a:100000,b:1")


def test_opening(tmp_path):
    for name in "ab":
        build_stores(tmp_path / name, [Document(str(n), "d") for n in range(30)], Lengths(), held_out=0.3)
    text = f"{tmp_path}/a:1,{tmp_path}/b:3"
    train, evaluation = open_mixture(text, "bytes", held_out=True)
    assert [(store.path, share) for store, share in train] == [(tmp_path / "a/train", 1), (tmp_path / "b/train", 3)]
    assert [store.path for store, _ in evaluation] == [tmp_path / "a/eval", tmp_path / "b/eval"]
    assert open_mixture(text, "bytes", held_out=False)[1] is None
    with pytest.raises(ValueError, match="was built with tokenizer bytes, not other"):
        open_mixture(text, "other", held_out=True)
    for name, other in (("train", "kept"), ("eval", "train"), ("kept", "eval")):  # another train store than was built
        (tmp_path / "b" / name).rename(tmp_path / "b" / other)
    with pytest.raises(ValueError, match=r"b/\w+/store\.json (has \d+ bytes, \d+ were|is not what was) written"):
        open_mixture(text, "bytes", held_out=True)
    (tmp_path / "b/eval").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="b has no eval store"):
        open_mixture(text, "bytes", held_out=True)


@pytest.mark.parametrize("shares", [[1, 2], [34, 66], [7, 1]], ids=str)
def test_shares_of_tokens(tmp_path, shares):
    """Long documents leave much padding: of as many sequences, they would be fewer tokens."""
    long, short = build(tmp_path / "long", [40] * 30), build(tmp_path / "short", [7] * 200)
    tokens = {}
    for unit in ("sequences", "tokens"):
        packing = PackingOptions(packing="whole", mixture_by=unit)
        parts = list(zip((long, short), shares, strict=True))
        loader = Loader(parts, batch_size=4, seq_len=64, seed=3, layout="contiguous", ring_size=1, packing=packing)
        tokens[unit] = [0, 0]
        for index in range(3000):
            part, _ = loader.sequences.source(index)
            tokens[unit][part] += int(
                np.diff((long, short)[part].offsets)[loader.sequences.documents_of(index)[1]].sum()
            )
    wanted = shares[0] / sum(shares)
    assert tokens["tokens"][0] / sum(tokens["tokens"]) == pytest.approx(wanted, abs=2e-3)
    assert tokens["sequences"][0] / sum(tokens["sequences"]) < wanted - 0.02


def test_of_equal_sequences_tokens_are_sequences(stores):
    packing = PackingOptions(mixture_by="tokens")
    parts = list(zip(stores, [7, 3], strict=True))
    loader = Loader(parts, batch_size=4, seq_len=64, seed=3, layout="contiguous", ring_size=1, packing=packing)
    assert list(loader.sequences.shares) == [7, 3]
