"""Bin packing: fill rates and spreads of attention work at the lengths of real corpora, and that nothing is lost."""

import numpy as np
import pytest

from ringformer.data.packing.bin_packing import attention_work, order_by_batch, pack, spread


def log_uniform(low, high, n):
    return np.exp(np.random.default_rng(0).uniform(np.log(low), np.log(high), n)).astype(np.int64)


def chats(n, longest):
    """Log-normal with mean 2000 tokens."""
    return np.random.default_rng(0).lognormal(np.log(2000) - 0.7**2 / 2, 0.7, n).astype(np.int64).clip(20, longest)


CORPORA = [
    ("books", log_uniform(10_000, 100_000, 6000), 2**17, 0.97),
    ("long books", log_uniform(100_000, 200_000, 6000), 2**19, 0.93),
    ("chats", chats(40_000, 2**15), 2**15, 0.99),
    ("chats, long context", chats(40_000, 2**17), 2**17, 0.99),
    ("books that cannot be paired", log_uniform(200_000, 500_000, 2000), 2**19, 0.84),
]


def work_of(lengths, bins, packed_attention):
    """Pairs of tokens that see each other or themselves, both ways, in each bin; counted bin by bin."""
    held = [lengths[bins == b] for b in range(bins.max() + 1)]
    return np.array([(n**2).sum() if packed_attention == "document" else n.sum() ** 2 for n in held], float)


@pytest.mark.parametrize("packed_attention", ["document", "sequence"])
@pytest.mark.parametrize(("name", "lengths", "capacity", "fill"), CORPORA, ids=[c[0] for c in CORPORA])
def test_sequences_are_full_and_batches_even(name, lengths, capacity, fill, packed_attention):
    bins = pack(lengths, capacity, np.random.default_rng(1), packed_attention)
    count = int(bins.max()) + 1
    assert set(bins.tolist()) == set(range(count))
    assert np.bincount(bins, lengths).max() <= capacity
    assert lengths.sum() / (count * capacity) >= fill
    for size in (4, 8, 16, 32):
        traded, order = order_by_batch(lengths, bins, capacity, size, 0, np.random.default_rng(2), packed_attention)
        assert sorted(order.tolist()) == list(range(count))
        assert np.bincount(traded, lengths).max() <= capacity
        assert set(traded.tolist()) == set(range(count))
        work = work_of(lengths, traded, packed_attention)
        np.testing.assert_array_equal(attention_work(lengths, traded, packed_attention), work)
        work = work[order][: count // size * size].reshape(-1, size)
        # The exceptions hold the few longest documents, or the sequence that is left half empty at the end. Where
        # tokens see all of their sequence, a long document costs no more than short ones.
        uneven = (spread(work) > 0.1).sum()
        assert np.median(spread(work)) <= 0.05
        allowed = max(0.08 * len(work), 2) if packed_attention == "document" else 1
        assert uneven <= allowed, f"{uneven} of {len(work)}"


def test_sequences_in_random_order_would_be_uneven():
    """What order_by_batch is for: the same sequences, batched as they come."""
    _, lengths, capacity, _ = CORPORA[0]
    bins = pack(lengths, capacity, np.random.default_rng(1))
    work = np.random.default_rng(2).permutation(attention_work(lengths, bins))
    assert np.median(spread(work[: len(work) // 16 * 16].reshape(-1, 16))) > 0.5


def test_epochs_pack_other_neighbours():
    _, lengths, capacity, _ = CORPORA[1]
    a, b = (pack(lengths, capacity, np.random.default_rng(seed)) for seed in (1, 2))

    def pairs(bins):
        order = np.argsort(bins, kind="stable")
        together = np.diff(bins[order]) == 0
        return set(zip(order[:-1][together].tolist(), order[1:][together].tolist(), strict=True))

    assert len(pairs(a) & pairs(b)) < 0.05 * len(pairs(a))


@pytest.mark.parametrize(("count", "phase"), [(3, 0), (3, 7), (8, 0), (8, 5), (50, 0), (50, 3), (51, 7)])
def test_any_number_of_sequences_fits_any_phase(count, phase):
    """The sequences that belong to batches shared with other epochs come first and last, and have middling work."""
    lengths, bins = np.arange(1, count + 1) * 10, np.arange(count)
    _, order = order_by_batch(lengths, bins, 10_000, 8, phase, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(count))
    head = min(-phase % 8, count)
    whole = order[head : head + (count - head) // 8 * 8].reshape(-1, 8)
    odd = np.setdiff1d(order, whole)
    if len(whole) > 2 and len(odd):
        assert count / 4 < odd.mean() < count * 3 / 4
        assert np.median(np.ptp(whole, axis=1)) <= 7 + len(odd)


@pytest.mark.parametrize("packed_attention", ["document", "sequence"])
def test_a_nearly_empty_sequence_is_filled_from_its_batch(packed_attention):
    """Three full sequences and one of a single piece trade until their work is even."""
    lengths = np.full(10 * 3 + 1, 10)
    bins = np.append(np.repeat(np.arange(3), 10), 3)
    traded, _ = order_by_batch(lengths, bins, 100, 4, 0, np.random.default_rng(0), packed_attention)
    assert sorted(np.bincount(traded).tolist()) == [7, 8, 8, 8]


def test_trades_make_even_what_is_seen():
    """Equal sums are even where all is seen, equal squares where each piece sees itself; the other is traded away."""
    sums = np.append([60, 40], np.full(30, 10)), np.append([0, 0], np.repeat([1, 2, 3], 10))
    squares = np.tile([60] + [20] * 9, 2), np.repeat([0, 1, 2, 3], [1, 9, 1, 9])
    for (lengths, bins), even in ((sums, "sequence"), (squares, "document")):
        size = int(bins.max()) + 1
        for packed_attention in ("document", "sequence"):
            moved, _ = order_by_batch(lengths, bins, 200, size, 0, np.random.default_rng(0), packed_attention)
            assert (moved != bins).any() == (packed_attention != even)
    assert np.bincount(moved, lengths).tolist() == [120] * 4


def test_what_is_even_depends_on_who_sees_whom():
    """Bins of nearly the same squares have other sums, and those of the same sum other squares."""
    lengths, bins = np.array([8, 2, 2, 2, 2, 6, 6, 2, 4, 4, 4, 4]), np.repeat([0, 1, 2], [5, 3, 4])
    assert attention_work(lengths, bins).tolist() == [80, 76, 64]
    assert attention_work(lengths, bins, "sequence").tolist() == [256, 196, 256]


def test_pieces_as_long_as_a_bin_fill_one_each():
    assert sorted(pack(np.array([5, 5, 5]), 5, np.random.default_rng(0)).tolist()) == [0, 1, 2]
    assert pack(np.array([4]), 5, np.random.default_rng(0)).tolist() == [0]
