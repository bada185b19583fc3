"""What a device holds while a state begins, compiled for hardware that is not here; beside it what the state holds.

The parameters are drawn by one program, the optimizer's state by another. Saving and restoring run none, so they hold
the state alone (tests/checkpoints/test_manager.py).

    python benchmarks/state_memory.py --out results/state_memory.json       # needs both compilers, minutes
    python benchmarks/state_memory.py --case llama_3b v5e-256 1,1,1,256     # one of them
"""

import argparse
import json
import math

import jax

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.programs import FIRST_STATE, INIT
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import weight_shardings

CASES = [
    ("llama_3b", "v5e-256", "1,1,1,256"),
    ("llama_3b", "v4-1024", "1,1,1,512"),
    ("llama_7b", "24xA100-80", "1,1,1,24"),
    ("llama2_70b", "96xA100-80", "1,1,1,96"),
]


def compile_case(model: str, target_name: str, mesh_dim: str) -> dict:
    """Bytes of one device: of the state, what it may hold while it begins, and what it holds."""
    config, target = LlamaConfig(**preset(model)), find_target(target_name)
    weights = weight_shardings(config, make_mesh(mesh_dim, target.devices()))
    layer = sum(4 * math.prod(w.shape[1:]) for w in jax.tree.leaves(weights["layers"]))
    largest = max(4 * math.prod(w.shape) for w in jax.tree.leaves(weights))
    workload = Workload(config, target, mesh_dim, seq_len=2 * target.num_devices)  # of which a beginning knows nothing
    init, first = compile_apart(workload, INIT), compile_apart(workload, FIRST_STATE)
    return {
        "model": model,
        "target": target_name,
        "mesh_dim": mesh_dim,
        "padded_weights": sum(w.shape != w.padded_shape for w in jax.tree.leaves(weights)),
        "state_bytes": init.state_bytes,
        "two_layers_bytes": 2 * layer,
        "largest_array_bytes": largest,
        "allowed_bytes": init.state_bytes + max(2 * layer, largest),
        "init_peak_bytes": init.peak_bytes,
        "first_state_peak_bytes": first.peak_bytes,
        "compiled_by": compiled_by(target),
        **made(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", nargs=3, metavar=("MODEL", "TARGET", "MESH_DIM"), help="print one as a line of JSON")
    what.add_argument("--out", type=output_argument, help="compile all cases")
    args = parser.parse_args()
    only_compilers()
    if args.case:
        print(json.dumps(compile_case(*args.case)))
        return
    rows = []
    for case in CASES:
        rows.append(compile_case(*case))
        print(json.dumps(rows[-1]), flush=True)
    command = "python benchmarks/state_memory.py --out results/state_memory.json"
    what = "compiled: bytes that a device holds while a state begins; saving and restoring hold the state alone"
    write_results(args.out, {"what": what, "command": command, "rows": rows})


if __name__ == "__main__":
    main()
