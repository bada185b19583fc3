"""Fill of sequences, evenness of batches, and duration of attention on a ring, of documents that are packed whole.

    python benchmarks/packing.py            # the table of docs/data.md
    python benchmarks/packing.py --million  # and the seconds that an epoch of 1e6 documents takes
    python benchmarks/packing.py --packed_attention=sequence    # the table where tokens see all of their sequence
    python benchmarks/packing.py --ring     # writes the tables of docs/data.md on rings, layouts and buckets

Lengths are drawn like those of books (log-uniform) and chats (log-normal, mean 2000, sigma 0.7). The work of a sequence
is the sum of its squared document lengths, or the square of its length, the spread of a batch (max - min) / mean of it,
and the waiting what batches cost over all, sum of max / sum of mean - 1, if one replica has one sequence.

On a ring, the table counts chunk pairs (`ringformer/data/packing/ring_work.py`): the slowest rank of each hop over the
mean, times the computed over the visible pairs. "By document" cuts each document into pieces for all ranks; it is
counted, not built. Speeds are modelled: the closed forms' seconds of a step, attention's times these factors, and the
hops that attention does not hide.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.tables import write_table
from ringformer.data.packing.bin_packing import attention_work, order_by_batch, pack, spread
from ringformer.data.packing.ring_balance import LAYOUTS, batches_of, in_buckets, segments, sequences_of
from ringformer.data.packing.ring_work import KERNEL_SHARES, RingWork, mean, overall, ring_work
from ringformer.estimate.reports.packed_documents import in_layout, seconds_of_documents
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from ringformer.ops.layouts import Layout

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
RINGS_BEGIN, SPEEDS_BEGIN = (
    f"<!-- {name}: written by benchmarks/packing.py --ring -->" for name in ("rings", "speeds")
)


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


ON_RINGS = {
    "8 equal documents, 512K on 32": ("equal", 2**16, 2**19, 32),
    "32 equal documents, 512K on 32": ("equal", 2**14, 2**19, 32),
    "log-normal around 16K, 512K on 32": ("around", 2**14, 2**19, 32),
    "chats of 1.2K, 512K on 32": ("chats", 1200, 2**19, 32),
    "log-normal around 16K, 512K on 8": ("around", 2**14, 2**19, 8),
    "chats of 1.2K, 128K on 8": ("chats", 1200, 2**17, 8),
}
"""Distributions of lengths, sequences and ranks."""
ON_RINGS_CHUNKS = 1024, 512, 256
WAYS = "zigzag", "striped", "by document", "buckets, zigzag", "buckets, striped"


def drawn(kind: str, size: int, longest: int) -> np.ndarray:
    """The lengths of many documents; those around a size are log-normal with sigma 1, chats with a mean and 1.4."""
    rng = np.random.default_rng(0)
    if kind == "equal":
        return np.full(64 * longest // size, size)
    mean, sigma = (np.log(size), 1.0) if kind == "around" else (np.log(size) - 1.4**2 / 2, 1.4)
    return np.clip(rng.lognormal(mean, sigma, 64 * longest // size), 64, longest).astype(np.int64)


def by_document(lengths: np.ndarray, ranks: int, chunk: int) -> RingWork:
    """Count documents that are cut into 2n pieces each, a low and a high one a rank, as zigzag cuts sequences."""
    rounded = -(-lengths // (2 * ranks)) * 2 * ranks
    ids, begin = np.repeat(np.arange(len(rounded)), rounded), np.cumsum(rounded) - rounded
    pieces = [np.split(np.arange(b, b + n), 2 * ranks) for b, n in zip(begin, rounded, strict=True)]
    order = [
        np.concatenate([of[piece] for of in pieces]) for rank in range(ranks) for piece in (rank, 2 * ranks - 1 - rank)
    ]
    work = ring_work(ids, "zigzag", ranks, chunk, np.concatenate(order))
    return work._replace(visible=float((lengths * (lengths + 1) // 2).sum()))


def ring_row(name: str) -> str:
    """Return a distribution's line of the table: the products at each chunk, and the fastest way."""
    (kind, size, seq_len, ranks), idle = ON_RINGS[name], 0
    lengths = drawn(kind, size, seq_len)
    rows = sequences_of(lengths, seq_len)
    batches, cells, best = batches_of(lengths, seq_len, int(np.log2(ranks))), [], {}
    for way in WAYS:
        products = []
        for chunk in ON_RINGS_CHUNKS:
            if way.startswith("buckets"):
                work = overall(in_buckets(batches, ranks, cast(Layout, way.split(", ")[1]), chunk))
            elif way == "by document":
                work = mean([by_document(row, ranks, chunk) for row in rows])
            else:
                work = mean([ring_work(segments(row, seq_len), cast(Layout, way), ranks, chunk) for row in rows])
                idle = work.idle_hops if way == "zigzag" else idle
            products.append(work.product)
            best[way, chunk] = work.product / KERNEL_SHARES[chunk]
        cells.append(" / ".join(f"{product:.2f}" for product in products))
    built = {key: seconds for key, seconds in best.items() if key[0] != "by document"}
    way, chunk = min(built, key=built.__getitem__)
    rings = ", ".join(f"{ranks >> k}: {share:.0%}" for k, (share, _) in batches.items())
    return f"| {name} | {' | '.join(cells)} | {rings} | {way}, {chunk} | {idle} of {ranks - 1} |"


SPEEDS = ("llama2_7b", "v5e-64"), ("llama3_8b", "v5e-64"), ("llama2_7b", "8xH100"), ("llama3_8b", "8xH100")
"""Models and targets of the modelled speeds, on the last distribution; weights are sharded over all rings of 8."""


def ring_table() -> list[str]:
    """Return the table of all distributions."""
    ways = " | ".join([f"{WAYS[0]}, chunks of {' / '.join(map(str, ON_RINGS_CHUNKS))}", *WAYS[1:]])
    head = f"| documents | {ways} | tokens on rings of | fastest | idle hops, zigzag |"
    return [head, "|---" * 9 + "|", *map(ring_row, ON_RINGS)]


def speed_table() -> list[str]:
    """Return the table of speeds."""
    head = "| documents | model | target | zigzag | buckets, zigzag | striped | buckets, striped | gain |"
    return [head, "|---" * 8 + "|", *speed_rows()]


def speed_rows() -> Iterator[str]:
    """Lines of the table of speeds: one ring of all ranks in either layout, and buckets."""
    name, (kind, size, seq_len, ranks) = list(ON_RINGS.items())[-1]
    lengths = drawn(kind, size, seq_len)
    rows, batches = sequences_of(lengths, seq_len), batches_of(lengths, seq_len, 3)
    for model, target in SPEEDS:
        plain = preset_workload(model, find_target(target), seq_len)
        groups = plain.target.num_devices // ranks
        workload = replace(plain, mesh_dim=f"1,{groups},1,{ranks}", batch_size=groups).with_kernel()[0]
        speeds = {}
        for layout in LAYOUTS:
            of_layout = in_layout(workload, layout)
            whole = mean([ring_work(segments(row, seq_len), layout, ranks, 1024) for row in rows])
            pieces = in_buckets(batches, ranks, layout, 1024)
            speeds[layout] = workload.step_tokens / seconds_of_documents(of_layout, {1: (1.0, whole)}, chunk=1024)
            speeds[f"buckets, {layout}"] = workload.step_tokens / seconds_of_documents(of_layout, pieces, chunk=1024)
        cells = " | ".join(f"{speed:,.0f}" for speed in speeds.values())
        without = max(speeds["zigzag"], speeds["striped"])
        gain = max(speeds.values()) / without
        yield f"| {name} | {model} | {target} | {cells} | {gain:.2f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", action="store_true")
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--packed_attention", choices=["document", "sequence"], default="document")
    asked = parser.parse_args()
    if asked.ring:
        for begin, lines in ((RINGS_BEGIN, ring_table()), (SPEEDS_BEGIN, speed_table())):
            print("\n".join(lines), end="\n\n", flush=True)
            write_table(PAGE, begin, "\n".join(lines), "<!-- end -->")
        raise SystemExit
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
