"""One of several processes that read the batches of some steps, prefetched; it keeps the parts that its devices hold.

`python -m tests.train.stream_process ADDRESS PROCESS PROCESSES STORE SEQ_LEN START STOP OUT`; OUT/PROCESS-STEP.npz.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from ringformer.data import Loader, TokenStore
from ringformer.parallel.mesh import BATCH, make_mesh

BATCH_SIZE, SEED, FIELDS = 4, 11, ("tokens", "targets", "positions", "segment_ids", "mask")


def loader(store: Path, seq_len: int) -> Loader:
    """For a ring of four in zigzag."""
    return Loader(TokenStore(store), batch_size=BATCH_SIZE, seq_len=seq_len, seed=SEED, layout="zigzag", ring_size=4)


def read(store: Path, seq_len: int, steps: range, out: Path) -> None:
    sharding = NamedSharding(make_mesh("1,2,1,4"), BATCH)
    batches = loader(store, seq_len).iterate(steps.start, sharding)
    for step, batch in zip(steps, batches, strict=False):
        parts = {}
        for shard in range(len(batch.tokens.addressable_shards)):
            for name in FIELDS:
                part = getattr(batch, name).addressable_shards[shard]
                bounds = "_".join(str(b) for s in part.index for b in (s.start or 0, s.stop or 0))
                parts[f"{name}/{bounds}"] = np.asarray(part.data)
        np.savez(out / f"{jax.process_index()}-{step}.npz", **parts)
    batches.close()


if __name__ == "__main__":
    address, process, processes, store, seq_len, start, stop, out = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // int(processes))
    jax.distributed.initialize(address, int(processes), int(process))
    read(Path(store), int(seq_len), range(int(start), int(stop)), Path(out))
