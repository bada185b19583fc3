"""What verifying a token store costs: megabytes a second of opening one, from the disk and from the page cache.

    python benchmarks/open_store.py --megabytes 1000

The store has random ids of 16 bits in documents of 100,000 tokens. `cold`: its pages were dropped from the cache
before. `open` is the time until a run may begin (a large store is verified in a thread), `verified` that until the
verdict.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from ringformer.data import ByteTokenizer, TokenStore
from ringformer.data.stores.token_store import StoreWriter


class SixteenBits(ByteTokenizer):
    vocab_size = 2**16


def write(folder: Path, megabytes: float) -> TokenStore:
    writer, rng = StoreWriter(folder, SixteenBits(), {}), np.random.default_rng(0)
    for _ in range(round(megabytes * 1e6 / 200_000)):
        writer.add(rng.integers(0, 2**16, 100_000), None, 200_000, b"")
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
    return {"open_seconds": round(opened, 4), "verified_seconds": round(verified, 3),
            "megabytes_per_second": round(size / 1e6 / verified)}  # fmt: skip


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


if __name__ == "__main__":
    main()
