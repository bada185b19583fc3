"""The smallest program that shows how a compiler gathers weights and sums their gradients.

    python benchmarks/weight_collectives.py [--target=v5p:4x4x4]

Compiled, nothing is run: a scan over two layers, each one matrix that 64 devices share, forward and backward. For each
chip whose compiler is installed, first with the compiler's defaults, then with `training=True`: the collectives, and
how many are synchronous. Half a minute a chip.
"""

import argparse
import math
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ringformer.estimate.compiled.dump import AS_COMPILED_PROGRAMS_PRINT, PROGRAM, compile_printing
from ringformer.estimate.seconds.link_loads import network
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import Rates
from ringformer.estimate.workloads.programs import abstract_array
from ringformer.estimate.workloads.targets import Target, find_target, only_compilers
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.gather_weight import gather_weight
from ringformer.parallel.mesh import make_mesh

TARGETS = "v4:4x4x4", "v5e:8x8", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x4x4", "64xA100-80", "64xH100"
"""Targets of 64 devices."""
L, D, T = 2, 4096, 2048
"""Layers, features, and tokens of a device."""


def lower(mesh: Mesh) -> jax.stages.Lowered:
    """Lower the gradient of a loss in the weights: float32 [L, D, D], shards of D/64 rows."""

    def loss(w, x):
        def layer(x, w):
            return x @ gather_weight(w, ("sp",), -2, D, jnp.bfloat16), None

        return jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32).sum()

    w, x = PartitionSpec(None, "sp"), PartitionSpec("sp")
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(w, x), out_specs=w)
    tokens = abstract_array(mesh, x, jnp.bfloat16, mesh.size * T, D)
    return jax.jit(step).lower(abstract_array(mesh, w, jnp.float32, L, D, D), tokens)


def collectives(target: Target, mesh: Mesh, options: dict[str, str]) -> Counter:
    """Compile the program, and count its collectives by kind, dtype, and whether they are synchronous."""
    with tempfile.TemporaryDirectory() as folder:
        compile_printing(lower(mesh), options, AS_COMPILED_PROGRAMS_PRINT | {"xla_dump_to": folder})
        (scheduled,) = Path(folder).glob(PROGRAM[mesh.devices.flat[0].platform])
        transfers = read_schedule(scheduled.read_text(), Rates(1.0, network(target, mesh), 1.0, 0.0)).transfers
    counts: Counter = Counter()
    for t in transfers:
        if math.prod(t.shape) > 1:
            counts[t.kind, t.dtype, "asynchronous" if t.asynchronous else "synchronous"] += int(t.count)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="64 devices; without: one target of each generation")
    args = parser.parse_args()
    only_compilers()
    for target in map(find_target, TARGETS if args.target is None else [args.target]):
        if target.missing_compiler:
            print(f"{target.name:12} {target.missing_compiler}")
            continue
        mesh = make_mesh("1,1,1,64", target.devices())
        for name, training in (("defaults", False), ("training", True)):
            options = dict(compiler_options(mesh, training))
            found = ", ".join(f"{n} {' '.join(key)}" for key, n in sorted(collectives(target, mesh, options).items()))
            print(f"{target.name:12} {name:9} {found}", flush=True)


if __name__ == "__main__":
    main()
