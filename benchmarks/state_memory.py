"""What a device holds while a state begins, compiled for hardware that is not here; beside it what the state holds.

The parameters are drawn by one program, the optimizer's state by another. Saving and restoring run none, so they hold
the state alone (tests/train/test_checkpoints.py).

    python benchmarks/state_memory.py --out results/state_memory.json       # needs both compilers, minutes
    python benchmarks/state_memory.py --case llama_3b v5e-256 1,1,1,256     # one of them
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from ringformer.compiler_options import compiler_options
from ringformer.estimate.compile_step import WITHOUT_DEVICES
from ringformer.estimate.compiler_dump import compile_until_scheduled
from ringformer.estimate.targets import compiled_by, find_target, only_compilers
from ringformer.mesh import make_mesh
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.train.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import (
    abstract_params,
    abstract_state,
    decayed,
    make_first_state,
    make_init,
    state_shardings,
    weight_shardings,
)

CASES = [
    ("llama_3b", "v5e-256", "1,1,1,256"),
    ("llama_3b", "v4-1024", "1,1,1,512"),
    ("llama_7b", "24xA100-80", "1,1,1,24"),
    ("llama2_70b", "96xA100-80", "1,1,1,96"),
]


def compile_case(model: str, target_name: str, mesh_dim: str) -> dict:
    """Bytes of one device: of the state, what it may hold while it begins, and what it holds. Takes this process."""
    config, target = LlamaConfig(**preset(model)), find_target(target_name)
    mesh = make_mesh(mesh_dim, target.devices())
    optimizer = make_optimizer(OptimizerConfig(), 1000, decayed(config))
    weights = weight_shardings(config, mesh)
    shardings = state_shardings(weights, optimizer)
    state = abstract_state(shardings, optimizer, mesh)
    state_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    layer = sum(4 * math.prod(w.shape[1:]) for w in jax.tree.leaves(weights["layers"]))
    largest = max(4 * math.prod(w.shape) for w in jax.tree.leaves(weights))

    options = compiler_options(mesh) | WITHOUT_DEVICES[target.chip.kind]
    init = make_init(config, weights, mesh, seed=0).lower()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _, drawn = compile_until_scheduled(init, options, target.chip.kind, Path(folder))
    first = make_first_state(optimizer, shardings, mesh).lower(abstract_params(weights, mesh)).compile(options)
    m = first.memory_analysis()
    # The parameters lie there though the program, which makes zeros, does not read them.
    begun = drawn.outputs + m.output_size_in_bytes + m.temp_size_in_bytes
    return {
        "model": model, "target": target_name, "mesh_dim": mesh_dim,
        "padded_weights": sum(w.shape != w.padded_shape for w in jax.tree.leaves(weights)),
        "state_bytes": state_bytes, "two_layers_bytes": 2 * layer, "largest_array_bytes": largest,
        "allowed_bytes": state_bytes + max(2 * layer, largest),
        "init_peak_bytes": sum(drawn), "first_state_peak_bytes": begun,
        "compiled_by": compiled_by(target),
        "date": str(datetime.date.today()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", nargs=3, metavar=("MODEL", "TARGET", "MESH_DIM"), help="print one as a line of JSON")
    what.add_argument("--out", type=Path, help="compile all cases, each in a process of its own")
    args = parser.parse_args()
    if args.case:
        only_compilers()
        print(json.dumps(compile_case(*args.case)), flush=True)
        os._exit(0)  # the compiler is still at work on machine code
    rows = []
    for case in CASES:
        command = [sys.executable, __file__, "--case", *case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(done.stdout, end="")
    command = "python benchmarks/state_memory.py --out results/state_memory.json"
    what = "compiled: bytes that a device holds while a state begins; saving and restoring hold the state alone"
    args.out.write_text(json.dumps({"what": what, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
