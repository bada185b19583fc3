"""What the hashes of a checkpoint cost: of the time that training waits for a save, and of the time in the background.

    python benchmarks/checkpoint_hashes.py FOLDER --megabytes=600 --pairs=5

Saves a state of random numbers (parameters and both moments), by turns as a run does and without hashing: no chunk's
file is read for its hash, and no manifest is written. Prints JSON: the seconds of each save, by the wall and of CPU (of
the thread that waits, and of the process after it), and the medians of the pairs' ratios. In /dev/shm no disk
interferes.
"""

import argparse
import json
import platform
import shutil
import statistics
import time
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ringformer import checkpoint_arrays
from ringformer.checkpoint_tree import PlainFiles
from ringformer.mesh import make_mesh
from ringformer.models.llama_config import LlamaConfig
from ringformer.train.checkpoint_integrity import checkpoint_faults
from ringformer.train.checkpoints import Checkpoints
from ringformer.train.config import OptimizerConfig
from ringformer.train.keep_policy import Keep
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import abstract_state, decayed, state_shardings, weight_shardings

HASH, FINALIZE = checkpoint_arrays.hash_of, PlainFiles.finalize
WIDTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to save; what is in it is deleted")
    parser.add_argument("--megabytes", type=int, default=600, help="of the state")
    parser.add_argument("--pairs", type=int, default=5, help="saves with hashes and without, by turns")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    layer = 4 * 3 * (4 * WIDTH**2 + 3 * WIDTH * 4 * WIDTH)  # bytes: parameters and two moments
    layers = -(-args.megabytes * 10**6 // layer)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_layers=layers, num_heads=8, num_kv_heads=8,
        head_dim=WIDTH // 8,
    )  # fmt: skip
    mesh, optimizer = make_mesh("1,1,1,1", jax.devices()[:1]), make_optimizer(OptimizerConfig(), 1000, decayed(config))
    shardings = state_shardings(weight_shardings(config, mesh), optimizer)
    rng = np.random.default_rng(0)

    def array(x):
        drawn = rng.standard_normal(x.shape, np.float32) if x.dtype == jnp.float32 else np.zeros(x.shape, x.dtype)
        return jax.device_put(drawn.astype(x.dtype), x.sharding)

    state = jax.tree.map(array, abstract_state(shardings, optimizer, mesh))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    rows: list[dict] = []
    for pair in range(-1, args.pairs):
        for hashed in (True, False) if pair % 2 else (False, True):
            row = save(args.folder, state, shardings, optimizer, mesh, hashed)
            if pair >= 0:  # the first is there to warm up
                rows.append({"pair": pair, "hashed": hashed, **row})
    ratios = {
        name: statistics.median(
            next(r for r in rows if r["pair"] == pair and r["hashed"])[name]
            / next(r for r in rows if r["pair"] == pair and not r["hashed"])[name]
            for pair in range(args.pairs)
        )
        for name in ("blocked_s", "blocked_cpu_s", "background_s", "background_cpu_s")
    }
    began = time.perf_counter()
    checkpoint_faults(args.folder / "hashed", 0)
    print(json.dumps({
        "what": "measured", "state_bytes": size, "ratios": ratios, "verified_s": time.perf_counter() - began,
        "saves": rows, "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "date": str(date.today()),
    }))  # fmt: skip
    shutil.rmtree(args.folder)


def save(folder, state, shardings, optimizer, mesh, hashed: bool) -> dict[str, float]:
    """Seconds of one save into an empty folder."""
    checkpoint_arrays.hash_of = HASH if hashed else lambda path: (0, "")
    PlainFiles.finalize = FINALIZE if hashed else lambda self, directory: None
    run = folder / ("hashed" if hashed else "plain")
    shutil.rmtree(run, ignore_errors=True)
    checkpoints = Checkpoints(run, shardings, optimizer, mesh, Keep())
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    checkpoints.save(state)
    blocked, blocked_cpu = time.perf_counter() - wall, time.process_time() - cpu
    blocked_thread = time.thread_time() - thread
    checkpoints._manager.wait_until_finished()
    background = {"background_s": time.perf_counter() - wall - blocked,
                  "background_cpu_s": time.process_time() - cpu - blocked_cpu}  # fmt: skip
    checkpoints._unchecked = None
    checkpoints.close()
    return {"blocked_s": blocked, "blocked_cpu_s": blocked_thread, **background}


if __name__ == "__main__":
    main()
