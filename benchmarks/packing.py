"""How full are the sequences, and how even the batches, when documents are packed whole?

    python benchmarks/packing.py            # the table of docs/data.md
    python benchmarks/packing.py --million  # and the seconds that an epoch of 1e6 documents takes
    python benchmarks/packing.py --packed_attention=sequence    # the table where tokens see all of their sequence

Lengths are drawn like those of books (log-uniform) and chats (log-normal, mean 2000, sigma 0.7). The work of a sequence
is the sum of its squared document lengths, or the square of its length, the spread of a batch (max - min) / mean of it,
and the waiting what batches cost over all, sum of max / sum of mean - 1, if one replica has one sequence.
"""

import argparse
import time

import numpy as np

from ringformer.data.packing.bin_packing import attention_work, order_by_batch, pack, spread


def books(low, high, n):
    return np.exp(np.random.default_rng(0).uniform(np.log(low), np.log(high), n)).astype(np.int64)


def chats(n, longest):
    return np.random.default_rng(0).lognormal(np.log(2000) - 0.7**2 / 2, 0.7, n).astype(np.int64).clip(20, longest)


def corpora():
    for n in (2_000, 20_000):
        yield f"{n} of 10K-100K", books(10_000, 100_000, n), 2**17
        yield f"{n} of 100K-200K", books(100_000, 200_000, n), 2**19
    for capacity in (2**19, 2**20):
        yield "2000 of 200K-500K", books(200_000, 500_000, 2000), capacity
    for n in (5_000, 50_000):
        yield f"{n} chats", chats(n, 2**15), 2**15
    yield "50000 chats", chats(50_000, 2**15), 2**17


def rows(name, lengths, capacity, mode):
    """Lines of the table: one for each batch size."""
    bins = pack(lengths, capacity, np.random.default_rng(0), mode)
    count = int(bins.max()) + 1
    as_packed = np.random.default_rng(1).permutation(attention_work(lengths, bins, mode))
    for size in (4, 8, 16, 32):
        in_batches = count // size * size  # bins; the last batch may be unfinished
        traded, order = order_by_batch(lengths, bins, capacity, size, 0, np.random.default_rng(1), mode)
        random = as_packed[:in_batches].reshape(-1, size)
        work = attention_work(lengths, traded, mode)[order][:in_batches].reshape(-1, size)
        s = spread(work)
        yield (
            f"| {name} | {capacity // 1024}K | {lengths.sum() / (count * capacity):.1%} | {size} "
            f"| {np.median(spread(random)):.0%} | {np.median(s):.1%} | {(s > 0.1).sum()} of {len(s)} "
            f"| {waiting(random):.0%} | {waiting(work):.1%} |"
        )


def waiting(work):
    return work.max(axis=1).sum() / work.mean(axis=1).sum() - 1


def seconds(lengths, capacity):
    start = time.process_time()
    bins = pack(lengths, capacity, np.random.default_rng(0))
    order_by_batch(lengths, bins, capacity, 16, 0, np.random.default_rng(1))
    return time.process_time() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--packed_attention", choices=["document", "sequence"], default="document")
    asked = parser.parse_args()
    print(
        "| documents | context | filled | batch | median spread, random batches | median spread | batches over 10% "
        "| waiting, random batches | waiting |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for corpus in corpora():
        for line in rows(*corpus, asked.packed_attention):
            print(line)
    if asked.million:
        for name, corpus in (
            ("chats", (chats(10**6, 2**15), 2**15)),
            ("10K-100K", (books(10**4, 10**5, 10**6), 2**17)),
        ):
            print(f"1e6 {name}: {seconds(*corpus):.1f} s of one core an epoch")
