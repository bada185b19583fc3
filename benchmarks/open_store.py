"""What verifying a token store costs: megabytes a second of opening one, from the disk and from the page cache; and the
share of the loader's time that comparing blocks as they are read takes.

    python benchmarks/open_store.py --megabytes 1000

The store has random ids of 16 bits in documents of 100,000 tokens. `cold`: its pages were dropped from the cache
before. `open` is the time until a run may begin (a large store is verified in a thread), `verified` that until the
verdict. `read` is of batches of one sequence, from stores of 40 MB with documents of several lengths in the page cache:
the median of a batch's milliseconds, and that of the share in which its blocks were hashed and compared.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from ringformer.data import ByteTokenizer, Loader, TokenStore
from ringformer.data.stores.checked_array import CheckedArray
from ringformer.data.stores.token_store import StoreWriter


class SixteenBits(ByteTokenizer):
    vocab_size = 2**16


def write(folder: Path, megabytes: float, length: int = 100_000) -> TokenStore:
    writer, rng = StoreWriter(folder, SixteenBits(), {}), np.random.default_rng(0)
    for _ in range(round(megabytes * 1e6 / 2 / length)):
        writer.add(rng.integers(0, 2**16, length), None, 2 * length, b"")
    writer.finish(skipped_empty=0, settings={})
    return TokenStore(folder)


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    store = TokenStore(folder)
    opened = time.perf_counter() - start
    store.check.wait()
    verified = time.perf_counter() - start
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "open_seconds": round(opened, 4),
        "verified_seconds": round(verified, 3),
        "megabytes_per_second": round(size / 1e6 / verified),
    }


class Timed(CheckedArray):
    """Counts the nanoseconds of its comparisons."""

    spent = 0

    def _compare(self, first: int, content: bytes) -> None:
        start = time.perf_counter_ns()
        super()._compare(first, content)
        self.spent += time.perf_counter_ns() - start


def reading(store: TokenStore, seq_len: int) -> dict[str, float]:
    store.tokens = tokens = Timed(store.tokens.path, store.tokens.dtype)
    tokens.whole_hash()
    loader = Loader(store, batch_size=1, seq_len=seq_len, seed=0, layout="zigzag", ring_size=8)
    sharding, times, shares = jax.sharding.SingleDeviceSharding(jax.devices()[0]), [], []
    for step in range(100):
        tokens.spent, start = 0, time.perf_counter_ns()
        jax.block_until_ready(loader.batch(step, sharding))
        times.append(time.perf_counter_ns() - start)
        shares.append(tokens.spent / times[-1])
    return {"milliseconds": round(float(np.median(times)) / 1e6, 3), "share": round(float(np.median(shares)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "train"
        write(folder, args.megabytes).check.wait()
        for _ in range(args.repeats):
            drop_from_cache(folder)
            print(json.dumps({"cold": measure(folder), "warm": measure(folder)}), flush=True)
    for length in (100, 1000, 100_000):
        with tempfile.TemporaryDirectory() as temporary:
            store = write(Path(temporary) / "store", 40, length)
            for seq_len in (4096, 131_072, 1_048_576):
                row = {"document": length, "seq_len": seq_len, **reading(store, seq_len)}
                print(json.dumps({"read": row}), flush=True)


if __name__ == "__main__":
    main()
