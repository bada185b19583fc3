"""Cycles of the flash attention kernels, a pair of chunks at a time, counted in the machine code that libtpu writes.

    python benchmarks/flash_cycles.py [--target=v5e] [--out=results/flash_cycles.json]

Compiled, not measured. A step is one pair of a grid: its body and the grid's own work. Ideal are the matrix products at
the units' full rate (v6e: at the half of it that a head of 128 features can use). Half a minute a kernel.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ringformer.estimate.machine_code import Grid, dump_flags, dumped_kernels, read_kernel
from ringformer.estimate.targets import compiled_by, find_target

TARGETS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v4": "v4:2x2x1", "v6e": "v6e:2x2"}
TOKENS = 65536
"""Of the shard: of a shorter one the compiler would keep whole operands on the chip, and the counts would lie."""

KERNELS = (
    ("forward", 1024, 1024, {}), ("forward", 2048, 1024, {}), ("forward", 2048, 2048, {}),
    ("forward", 1024, 1024, {"packed": 1}), ("forward", 1024, 1024, {"heads": 4}), ("forward", 1024, 1024, {"d": 100}),
    ("backward", 1024, 1024, {}), ("backward", 2048, 1024, {}),
    ("backward", 1024, 1024, {"packed": 1}), ("backward", 1024, 1024, {"heads": 4}),
    ("backward", 1024, 1024, {"d": 100}),
)  # fmt: skip
"""Which, tokens of a chunk of queries and of keys, and what is not usual: segment ids, query heads a key head, features
of a head."""


def compile_kernel(target: str, kind: str, q_chunk: int, k_chunk: int, packed: int, heads: int, d: int) -> None:
    """Compile one kernel, in a process whose machine code is dumped."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from ringformer.estimate.targets import only_compilers
    from ringformer.ops.blockwise_attention import Keys, Queries
    from ringformer.ops.kernels.flash_backward import flash_backward
    from ringformer.ops.kernels.flash_forward import flash_forward
    from ringformer.ops.kernels.pair_table import PairTable
    from ringformer.ops.online_softmax import Softmax

    only_compilers()
    mesh = jax.sharding.Mesh(find_target(TARGETS[target]).devices()[:1], "x")
    chunks = q_chunk, k_chunk

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    f32, bf16, int32 = jnp.float32, jnp.bfloat16, jnp.int32
    q, kv = array(bf16, 1, 1, heads, TOKENS, d), array(bf16, 2, 1, 1, TOKENS, d)
    o, row, ids = array(f32, *q.shape), array(f32, *q.shape[:-1]), array(int32, 1, TOKENS)
    columns, length = [array(int32, 64) for _ in range(6)], array(int32, 1)

    def forward(q, kv, ids, o, m, l, columns, length):  # noqa: E741
        ids = ids if packed else None
        table = PairTable(tuple(columns), length[0], (64, 0))
        return flash_forward(Softmax(o, m, l), Queries(q, ids), Keys(kv, ids, None), None, table, chunks, 0.1)

    def backward(q, kv, ids, dq, do, rows, columns, length):
        ids = ids if packed else None
        table = PairTable(tuple(columns), length[0], (64, 0))
        queries, keys = Queries(q, ids), Keys(kv, ids, None)
        return flash_backward(dq, queries, keys, None, do, rows, table, chunks, 0.1, 0.1)

    if kind == "forward":
        jax.jit(forward).lower(q, kv, ids, o, row, row, columns, length).compile()
    else:
        rows = array(f32, 2, *q.shape[:-1])
        jax.jit(backward).lower(q, kv, ids, o, q, rows, columns, length).compile()


def judge(target: str, kind: str, q_chunk: int, k_chunk: int, change: dict) -> dict:
    """The cycles of a step without and with a mask, and the share of the ideal that the former reaches."""
    shape = {"packed": 0, "heads": 1, "d": 128} | change
    with tempfile.TemporaryDirectory() as folder:
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        environment = os.environ | {"LIBTPU_INIT_ARGS": f"{given} {dump_flags(Path(folder))}"}
        arguments = [target, kind, str(q_chunk), str(k_chunk), *map(str, shape.values())]
        subprocess.run([sys.executable, __file__, "--compile", *arguments], env=environment, check=True,
                       capture_output=True, text=True)  # fmt: skip
        name = next(name for name in dumped_kernels(Path(folder)) if name.startswith(f"flash_{kind}"))
        text = dumped_kernels(Path(folder))[name].read_text()
    whole, masked = (_cycles(text, Grid(*pairs, 0)) for pairs in ((1, 0), (0, 1)))
    cores = find_target(TARGETS[target]).chip.tensor_cores
    assert cores is not None, "the targets are TPUs"
    products = 4 if kind == "forward" else 10
    rate = cores.matrix_flops_per_cycle * (0.5 if target == "v6e" and shape["d"] <= 128 else 1.0)
    ideal = products * shape["heads"] * q_chunk * k_chunk * shape["d"] / rate
    return {
        "target": target, "kernel": kind, "q_chunk": q_chunk, "k_chunk": k_chunk, **shape,
        "step_cycles": whole, "masked_step_cycles": masked, "ideal_cycles": ideal, "share_of_ideal": ideal / whole,
    }  # fmt: skip


def _cycles(text: str, grid: Grid) -> float:
    kernel = read_kernel(text, grid)
    assert kernel is not None, "the compiler has ended"
    return kernel.cycles


BEGIN, END = "<!-- flash cycles: results/flash_cycles.json -->", "<!-- end of flash cycles -->"


def table(targets: dict[str, dict]) -> str:
    """The shares in markdown: a row a kernel, a column a chip."""
    cells: dict[str, dict[str, str]] = {}
    for target, said in targets.items():
        for row in said["rows"]:
            what = {"packed": "segment ids", "heads": f"{row['heads']} query heads a key head", "d": f"d = {row['d']}"}
            unusual = [what[name] for name, usual in (("packed", 0), ("heads", 1), ("d", 128)) if row[name] != usual]
            name = ", ".join([f"{row['kernel']} {row['q_chunk']} x {row['k_chunk']}", *unusual])
            masked = row["masked_step_cycles"] / row["step_cycles"]
            cells.setdefault(name, {})[target] = f"{row['share_of_ideal']:.1%} ({masked:.2f})"
    lines = [f"| share of ideal (a masked pair over it) | {' | '.join(targets)} |", "|---" * (1 + len(targets)) + "|"]
    lines += [f"| {name} | {' | '.join(found.get(t, 'too large') for t in targets)} |" for name, found in cells.items()]
    return "\n".join(lines)


def write_table(docs: Path, targets: dict[str, dict]) -> None:
    """Put the table between the two marks of a page."""
    before, _, rest = docs.read_text().partition(BEGIN)
    docs.write_text(f"{before}{BEGIN}\n\n{table(targets)}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--out", type=Path, default=Path("results/flash_cycles.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--compile", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        target, kind, *numbers = args.compile
        compile_kernel(target, kind, *map(int, numbers))
        return
    for target in [args.target] if args.target else TARGETS:
        rows = []
        for kind, q_chunk, k_chunk, change in KERNELS:
            try:
                row = judge(target, kind, q_chunk, k_chunk, change)
            except subprocess.CalledProcessError as error:
                if "vmem" not in error.stderr.lower():
                    raise
                print(f"{target} {kind} {q_chunk} x {k_chunk} {change}: does not fit the chip's memory")
                continue
            rows.append(row)
            masked = row["masked_step_cycles"] / row["step_cycles"]
            print(f"{target} {kind:8} {q_chunk} x {k_chunk} {change or ''}: {row['step_cycles']:,.0f} cycles a step, "
                  f"{row['share_of_ideal']:.1%} of ideal; masked {masked:.3f} x", flush=True)  # fmt: skip
        known = json.loads(args.out.read_text())["targets"] if args.out.exists() else {}
        said = {"rows": rows, "compiled_by": compiled_by(find_target(TARGETS[target])),
                "date": datetime.date.today().isoformat()}  # fmt: skip
        content: dict = {"what": "compiled: cycles of a grid step of the flash attention kernels; nothing was run",
                   "command": "python benchmarks/flash_cycles.py", "targets": known | {target: said}}  # fmt: skip
        args.out.write_text(json.dumps(content, indent=1) + "\n")
        write_table(args.docs, content["targets"])


if __name__ == "__main__":
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    main()
