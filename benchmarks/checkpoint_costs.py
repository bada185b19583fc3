"""Costs of checkpoints: verifying them, and saving every 20 steps.

    python benchmarks/checkpoint_costs.py FOLDER [--megabytes=600] [--pairs=5] [--out=results/checkpoint_costs.json]

Manifest: a state of random numbers (parameters and both moments) is saved by turns as a run does and without a
manifest; chunks are read back both ways. Seconds of each save, by the wall and of CPU (of the thread that waits, and of
the process after it), and the medians of the pairs' ratios. Then the seconds of `checkpoint verify` and of restores,
which compare what they read. In /dev/shm no disk interferes.

Saving: configs/quickstart.py, saved every 20 steps. The ten steps around a save against the ten without one behind
them, by when metrics.jsonl has them; the median over the run, as a share of a step's time. Some five minutes.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.result_files import made, write_results
from ringformer.checkpoints.array_folder import PlainFiles
from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.verify import checkpoint_faults
from ringformer.cli.parser import output_argument
from ringformer.models.families.llama import LlamaConfig
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import abstract_state, state_shardings

FINALIZE = PlainFiles.finalize
WIDTH = 512
"""Of the model whose hashes are measured: H."""
EVERY, STEPS = 20, 240
"""Of the run whose saves are measured."""


def hashes(folder: Path, megabytes: int, pairs: int) -> dict:
    """What hashing adds to saves of so many megabytes."""
    layer = 4 * 3 * (4 * WIDTH**2 + 3 * WIDTH * 4 * WIDTH)  # bytes: parameters and two moments
    layers = -(-megabytes * 10**6 // layer)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=WIDTH // 8,
    )
    mesh, optimizer = (
        make_mesh("1,1,1,1", jax.devices()[:1]),
        make_optimizer(OptimizerConfig(), 1000, abstract_model(config)[2]),
    )
    shardings = state_shardings(weight_shardings(config, mesh), optimizer)
    rng = np.random.default_rng(0)

    def array(x):
        drawn = rng.standard_normal(x.shape, np.float32) if x.dtype == jnp.float32 else np.zeros(x.shape, x.dtype)
        return jax.device_put(drawn.astype(x.dtype), x.sharding)

    state = jax.tree.map(array, abstract_state(shardings, optimizer, mesh))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    rows: list[dict] = []
    for pair in range(-1, pairs):
        for hashed in (True, False) if pair % 2 else (False, True):
            row = save(folder, state, shardings, optimizer, mesh, hashed)
            if pair >= 0:  # the first is there to warm up
                rows.append({"pair": pair, "hashed": hashed, **row})
    ratios = {
        name: statistics.median(
            next(r for r in rows if r["pair"] == pair and r["hashed"])[name]
            / next(r for r in rows if r["pair"] == pair and not r["hashed"])[name]
            for pair in range(pairs)
        )
        for name in ("blocked_s", "blocked_cpu_s", "background_s", "background_cpu_s")
    }
    began = time.perf_counter()
    assert checkpoint_faults(folder / "hashed", 0) == []
    verified = time.perf_counter() - began
    restoring, restored = (
        Checkpoints(folder / "hashed", abstract_state(shardings, optimizer, mesh), shardings, Keep()),
        [],
    )
    for _ in range(pairs):
        began = time.perf_counter()
        jax.block_until_ready(restoring.restore_newest()[1])
        restored.append(time.perf_counter() - began)
    return {"state_bytes": size, "ratios": ratios, "verified_s": verified, "restored_s": restored, "saves": rows}


def save(folder, state, shardings, optimizer, mesh, hashed: bool) -> dict[str, float]:
    """Seconds of one save into an empty folder."""
    PlainFiles.finalize = FINALIZE if hashed else lambda self, directory: None
    run = folder / ("hashed" if hashed else "plain")
    shutil.rmtree(run, ignore_errors=True)
    checkpoints = Checkpoints(run, abstract_state(shardings, optimizer, mesh), shardings, Keep())
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    checkpoints.save(state)
    blocked, blocked_cpu = time.perf_counter() - wall, time.process_time() - cpu
    blocked_thread = time.thread_time() - thread
    checkpoints._manager.wait_until_finished()
    background = {
        "background_s": time.perf_counter() - wall - blocked,
        "background_cpu_s": time.process_time() - cpu - blocked_cpu,
    }
    checkpoints._unchecked = None
    checkpoints.close()
    return {"blocked_s": blocked, "blocked_cpu_s": blocked_thread, **background}


def saving(folder: Path) -> dict:
    """What a save adds to the steps of the quickstart's config, as a share of their time."""
    run = folder / "run"
    command = [
        sys.executable,
        "-m",
        "ringformer.cli",
        "train",
        "--config=configs/quickstart.py",
        f"--config.run_dir={run}",
        f"--config.data.store={folder / 'store'}",
        f"--config.steps={STEPS}",
        f"--config.checkpoint_every={EVERY}",
        "--config.eval_every=0",
    ]
    seconds: list[float] = []
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while process.poll() is None:
            time.sleep(0.005)
            rows = (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0
            seconds += [time.perf_counter()] * (rows - len(seconds))
    if process.returncode:
        raise SystemExit((folder / "log").read_text())
    half, rows = EVERY // 2, []
    for step in range(EVERY, STEPS - EVERY, EVERY):
        before, between, behind = (seconds[i - 1] for i in (step - half // 2, step + half // 2, step + 3 * half // 2))
        rows.append({"step": step, "with_save_s": between - before, "without_s": behind - between})
    share = statistics.median((row["with_save_s"] - row["without_s"]) / (2 * row["without_s"]) for row in rows)
    return {"config": "configs/quickstart.py", "checkpoint_every": EVERY, "share_of_step_time": share, "saves": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to save; it must not exist, and is deleted")
    parser.add_argument("--megabytes", type=int, default=600, help="of the state whose hashes are measured")
    parser.add_argument("--pairs", type=int, default=5, help="saves with hashes and without, by turns")
    parser.add_argument("--out", type=output_argument, default="results/checkpoint_costs.json")
    args = parser.parse_args()
    try:
        args.folder.mkdir()
    except OSError as error:
        parser.error(f"FOLDER {args.folder}: {error.strerror}; name a new one in a folder that is there")
    jax.config.update("jax_platforms", "cpu")
    try:
        found = {"hashes": hashes(args.folder / "hashes", args.megabytes, args.pairs), "saving": saving(args.folder)}
    finally:
        shutil.rmtree(args.folder)
    about = {
        "what": "measured: what checkpoints cost, on two CPU cores",
        "command": " ".join(["python benchmarks/checkpoint_costs.py", *sys.argv[1:]]),
        **made(),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }
    write_results(args.out, about | found)
    print(json.dumps(found["hashes"]["ratios"] | {"saving": found["saving"]["share_of_step_time"]}))


if __name__ == "__main__":
    main()
