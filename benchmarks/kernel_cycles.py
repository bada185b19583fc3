"""Cycles of attention kernels, a pair of chunks at a time, counted in the machine code that libtpu writes.

    python benchmarks/kernel_cycles.py [--target=v5e] [--kernel=pallas] [--ring] [--out=results/kernel_cycles.json]

Compiled, not measured: our kernels, JAX's splash attention (fused backward, blocks of 1024) and XLA's blocks
(`ops/blockwise_attention.py`) side by side. A step is one pair of a grid: its body and the grid's own work; of XLA's
blocks all instructions of a turn, a head's share. Ideal are the matrix products at the units' full rate (v6e: at the
half of it that a head of 128 features can use). Some six minutes a target. With --ring, instead, all instructions of a
rank's forward and backward round a ring of eight, of our kernels and of XLA's blocks, on v5e and v5p; minutes. The page
of `--docs` is of the default `--out`, and written with that alone.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, astuple
from functools import lru_cache
from pathlib import Path

from benchmarks.kernel_tables import KERNELS, KERNELS_OF_RINGS, read_targets, write_tables
from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_file
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.kernels.kernel_cycles import generate_cycles, kernel_keys
from ringformer.estimate.kernels.pair_kernels import (
    PARTS,
    TARGETS,
    TOKENS,
    Kind,
    Pair,
    TooLarge,
    count_kernel,
    dumped,
    find_generation,
    hbm_bytes_per_cycle,
)
from ringformer.estimate.kernels.slot_use import ProgramSlots, SlotUse, read_slot_use, times
from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.machine_code import dumped_kernels
from ringformer.estimate.seconds.program_seconds import ProgramSeconds, Rates, Seconds
from ringformer.estimate.workloads.programs import ATTENTION
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset

KINDS: tuple[Kind, ...] = ("forward", "backward")
LARGER = Pair(2048, 1024), Pair(2048, 2048)
USUAL = Pair(), Pair(packed=1), Pair(heads=4), Pair(head_dim=100)

Counts = dict[str, SlotUse]
"""Of a kernel's step without a mask, "whole", and with one, "masked"."""


def count_ours(generation: str, kind: Kind, pair: Pair) -> Counts:
    """Of our kernels."""
    return count_kernel(generation, kind, pair)


SPLASH = {"forward": "splash_mha_fwd", "backward": "splash_mha_dkv"}
"""What its kernels are called; the second computes dq too."""


def count_splash(generation: str, kind: Kind, pair: Pair) -> Counts:
    """Of JAX's splash attention, whose masked kernel is another than the one without a mask; counted for the usual
    shape. Its step is of one query head: as many of them as a key head has."""
    parts = {"whole": False} | ({"masked": True} if pair == Pair() else {})
    return {part: splash_kernels(generation, causal, pair)[kind] for part, causal in parts.items()}


@lru_cache
def splash_kernels(generation: str, causal: bool, pair: Pair) -> dict[str, SlotUse]:
    """By kind."""
    with dumped([__file__, "--compile", "splash", generation, str(int(causal)), *map(str, astuple(pair))]) as (
        folder,
        _,
    ):
        names = {kind: name for kind, begin in SPLASH.items() for name in dumped_kernels(folder) if begin in name}
        uses = {kind: read_slot_use(folder, name, generation, PARTS["whole"]) for kind, name in names.items()}
    return {kind: times(use, pair.heads) for kind, use in uses.items()}


def count_xla(generation: str, kind: Kind, pair: Pair) -> Counts:
    """Of XLA's blocks: a key head's share of a turn of each of the two loops over pairs, by their bytes of HBM where
    these take longer than the cycles."""
    command = [__file__, "--compile", f"xla_{kind}", generation, "0", *map(str, astuple(pair))]
    with dumped(command) as (folder, text):
        program = Program.parse(text)
        slots = ProgramSlots(program, folder, generation)
        loops = [
            i
            for name in program.executed
            for i in program.computations[name].values()
            if i.opcode == "while" and "_trips" in i.op_name
        ]
        assert len(loops) == 2, "one of pairs without a mask, one of pairs with"
        uses = [of_one_head(slots.of_computation(loop.called[0]), generation) for loop in loops]
        return dict(zip(("whole", "masked"), uses, strict=True))


def of_one_head(turn: SlotUse, generation: str) -> SlotUse:
    """What a core has to do for one key head of a turn of all, of which each core of a chip computes a part."""
    cores = find_target(TARGETS[generation]).chip.tensor_cores
    assert cores is not None, "the targets are TPUs"
    use = times(turn, cores.count / XLA_HEADS)
    use = use._replace(hbm_bytes=turn.hbm_bytes / XLA_HEADS)
    return use._replace(cycles=max(use.cycles, use.hbm_bytes / hbm_bytes_per_cycle(generation)))


COUNT: dict[str, Callable[[str, Kind, Pair], Counts]] = {"pallas": count_ours, "splash": count_splash, "xla": count_xla}
SPLASH_VMEM_KIB = 65472
"""VMEM for heads of 256 features, which need more than the default: that of MaxText's recipes for v5p."""
SPLASH_HEADS = 8
"""Query heads: of more its partial dq, one for each block of keys, would not fit the chip's HBM."""
XLA_HEADS, XLA_TOKENS = 8, 2 * TOKENS
"""Key heads of a pair of XLA's, so many that their logits stay on the chip, and tokens of its shard."""


def compile_splash(generation: str, causal: bool, pair: Pair) -> None:
    """Compile splash attention, forward and backward, in a process whose machine code is dumped."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    q_block = dict(block_q=pair.q_chunk, block_q_dkv=pair.q_chunk)
    k_block = dict.fromkeys(("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute"), pair.k_chunk)
    mask = splash.CausalMask((TOKENS, TOKENS)) if causal else splash.FullMask((TOKENS, TOKENS))
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * SPLASH_HEADS),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**q_block, **k_block, use_fused_bwd_kernel=True),
    )
    array = _arrays(generation)
    q = array(jnp.bfloat16, SPLASH_HEADS, TOKENS, pair.head_dim)
    k = array(jnp.bfloat16, SPLASH_HEADS // pair.heads, TOKENS, pair.head_dim)

    def both(q, k, v, ids, do):
        segments = splash.SegmentIds(ids, ids) if pair.packed else None
        o, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, segment_ids=segments), q, k, v)
        return o, backward(do)

    options = {"xla_tpu_scoped_vmem_limit_kib": str(SPLASH_VMEM_KIB)} if pair.head_dim > 128 else {}
    jax.jit(both).lower(q, k, k, array(jnp.int32, TOKENS), q).compile(compiler_options=options)


def compile_xla(generation: str, kind: Kind, pair: Pair) -> None:
    """Compile XLA's block of a causal shard, in a process whose machine code is dumped; print the program."""
    import jax
    import jax.numpy as jnp

    from ringformer.ops.blockwise_attention import Cotangents, Keys, Queries, block_backward, block_forward
    from ringformer.ops.online_softmax import Softmax
    from ringformer.ops.work_list import cut_axis, make_work_list

    array, f32, bf16 = _arrays(generation), jnp.float32, jnp.bfloat16
    q = array(bf16, 1, XLA_HEADS, pair.heads, XLA_TOKENS, pair.head_dim)
    ids = array(jnp.int32, 1, XLA_TOKENS) if pair.packed else None
    keys = Keys(array(bf16, 2, 1, XLA_HEADS, XLA_TOKENS, pair.head_dim), ids, None)
    o, row, rows = array(f32, *q.shape), array(f32, *q.shape[:-1]), array(f32, 3, *q.shape[:-1])
    q_chunks, k_chunks = (cut_axis(XLA_TOKENS, 1, chunk) for chunk in (pair.q_chunk, pair.k_chunk))
    work_list = make_work_list("contiguous", True, q_chunks, k_chunks, None)

    def forward(state, queries, keys):
        return block_forward(state, queries, keys, work_list, 0.1)

    def backward(dq, queries, keys, cotangents):
        return block_backward(dq, queries, keys, cotangents, work_list, 0.1)

    if kind == "forward":
        lowered = jax.jit(forward, donate_argnums=0).lower(Softmax(o, row, row), Queries(q, ids), keys)
    else:
        lowered = jax.jit(backward, donate_argnums=0).lower(o, Queries(q, ids), keys, Cotangents(q, rows))
    print(lowered.compile().as_text())


RINGS = {"v5e": "v5e-8", "v5p": "v5p-16"}
"""Slices of eight devices."""
RING_RANKS, RING_TOKENS = 8, 8192
RING_KERNELS = {
    "pallas": dict(head_groups=1, q_chunk=2048, k_chunk=2048),
    "xla": dict(head_groups=4, q_chunk=1024, k_chunk=1024),
}
"""XLA's with eight heads at a time, whose logits stay on the chip of v5e."""


def ring_workload(generation: str, kernel: str) -> Workload:
    """The attention of 7B: 32 heads of 128 features, bfloat16, with segment ids, as a train step has them."""
    model = LlamaConfig(**preset("llama_7b") | RING_KERNELS[kernel] | {"kernel": kernel, "layout": "zigzag"})
    return Workload(model, find_target(RINGS[generation]), f"1,1,1,{RING_RANKS}", RING_RANKS * RING_TOKENS)


def judge_ring(generation: str, kernel: str) -> dict:
    """What a rank's ring takes, and the share that the needed products, causal and exact, have of it."""
    workload, groups = ring_workload(generation, kernel), RING_KERNELS[kernel]["head_groups"]
    chip = workload.target.chip
    assert chip.tensor_cores is not None, "the targets are TPUs"
    program = Program.parse(compile_apart(workload, ATTENTION).text)
    cycles = generate_cycles(workload, kernel_keys(program), ATTENTION)
    rates = Rates(chip.bf16_flops, Network((), chip.link_bandwidth), chip.hbm_bandwidth, chip.clock_hz)
    by_purpose = ProgramSeconds(program, rates, cycles).purposes.values()
    seconds = sum(by_purpose, Seconds()).times(groups)
    tokens = RING_RANKS * RING_TOKENS
    kinds = (Pair(tokens, tokens, heads=workload.model.num_heads).ideal_cycles(generation, kind) for kind in KINDS)
    ideal = sum(kinds) * (tokens + 1) / (2 * tokens) / RING_RANKS / chip.tensor_cores.count / rates.cycles
    return {
        "kernel": kernel,
        **RING_KERNELS[kernel],
        "seconds": seconds.overlapped,
        "ideal_seconds": ideal,
        "cycle_seconds": seconds.busy,
        "hbm_seconds": seconds.memory,
        "counted": seconds.counted / seconds.overlapped,
        "share_of_cycles": ideal / seconds.busy,
        "share_of_ideal": ideal / seconds.overlapped,
    }


def _arrays(generation: str) -> Callable:
    """What describes an array on a device of a generation."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    only_compilers()
    mesh = jax.sharding.Mesh(find_target(TARGETS[generation]).devices()[:1], "x")
    sharding = NamedSharding(mesh, PartitionSpec())
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


USE = "cycles", "units", "fills", "spills", "hbm_bytes", "vmem_bytes"
"""Fields of a `SlotUse` that a row holds."""


def judge(generation: str, kernel: str, kind: Kind, pair: Pair) -> dict:
    """What a step of a kernel takes, and the share of the ideal that it reaches."""
    counts = COUNT[kernel](generation, kind, pair)
    whole, ideal = counts["whole"], pair.ideal_cycles(generation, kind)
    return {
        "kernel": kernel,
        "kind": kind,
        **asdict(pair),
        "step_cycles": whole.cycles,
        "masked_step_cycles": counts["masked"].cycles if "masked" in counts else None,
        "ideal_cycles": ideal,
        "share_of_ideal": ideal / whole.cycles,
        "hbm_cycles": whole.hbm_bytes / hbm_bytes_per_cycle(generation),
        **{name: getattr(whole, name) for name in USE},
    }


def rows(generation: str, kernels: list[str]) -> list[dict]:
    """All rows of a target's kernels, printed as they come."""
    found = []
    for kernel in kernels:
        for pair in (*USUAL, *LARGER) if kernel == "pallas" else USUAL:
            for kind in KINDS:
                try:
                    found.append(judge(generation, kernel, kind, pair))
                except TooLarge as error:
                    print(f"{generation} {kernel} {kind} {pair}: too large: {error}", flush=True)
                    continue
                print(line(generation, found[-1]), flush=True)
    return found


def rings(generation: str, kernels: list[str]) -> list[dict]:
    """The rings of a target's kernels, printed as they come."""
    found = []
    for kernel in kernels:
        found.append(judge_ring(generation, kernel))
        cycles, all_of_it, counted = (found[-1][name] for name in ("share_of_cycles", "share_of_ideal", "counted"))
        print(
            f"{generation} ring of {RING_RANKS} ranks, {RING_TOKENS} tokens each, {kernel}: {cycles:.1%} of the "
            f"matrix units by cycles, {all_of_it:.1%} with bytes that take longer; {counted:.0%} counted",
            flush=True,
        )
    return found


def line(generation: str, row: dict) -> str:
    """A row in words."""
    unusual = [f"{name}={row[name]}" for name, x in asdict(Pair()).items() if row[name] != x and "chunk" not in name]
    masked = f"{row['masked_step_cycles'] / row['step_cycles']:.3f} x" if row["masked_step_cycles"] else "-"
    units = ", ".join(f"{name.replace('_', '-')} {share:.0%}" for name, share in row["units"].items())
    return (
        f"{generation} {row['kernel']:6} {row['kind']:8} {row['q_chunk']} x {row['k_chunk']} {' '.join(unusual):12} "
        f"{row['step_cycles']:9,.0f} cycles a step, {row['share_of_ideal']:6.1%} of ideal; masked {masked}; {units}; "
        f"spills {row['spills']:,.0f}, fills {row['fills']:,.0f}; VMEM {row['vmem_bytes'] / 2**20:.1f} MiB; "
        f"HBM at most {row['hbm_bytes'] / 2**20:.2f} MiB, {row['hbm_cycles']:,.0f} cycles"
    )


OUT, DOCS = Path("results/kernel_cycles.json"), Path("docs/performance.md")


def find_kernels(kernel: str | None, ring: bool) -> list[str]:
    """Those that are counted. Raises ValueError if the one that was asked for cannot be."""
    known = KERNELS_OF_RINGS if ring else KERNELS
    if kernel is not None and kernel not in known:
        raise ValueError(
            f"--kernel={kernel}: of a ring {' and '.join(known)} are counted; name one of these, or leave --ring out"
        )
    return list(known) if kernel is None else [kernel]


def find_generations(target: str | None, ring: bool) -> list[str]:
    """Those that are counted. Raises ValueError if the one that was asked for cannot be."""
    if target is None:
        return list(RINGS if ring else TARGETS)
    generation = find_generation(target)
    if ring and generation not in RINGS:
        raise ValueError(
            f"--target={target}: rings are counted on {' and '.join(RINGS)}; name one of these, or leave --ring out"
        )
    return [generation]


def find_page(out: Path, docs: Path | None) -> Path | None:
    """The page that is written: that of the default file, none of another. Raises ValueError if there is none, or it
    was asked for from another file."""
    if out.resolve() != OUT.resolve():
        if docs:
            raise ValueError(
                f"--docs={docs} would be written from {out}; a page is written from {OUT} alone: leave "
                "--docs or --out out"
            )
        return None
    page = docs or DOCS
    if not page.is_file():
        raise ValueError(f"--docs={page}: there is no such page; run this in the root of a clone, or name another")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help=f"one of {', '.join(TARGETS)}; without: all")
    parser.add_argument("--kernel", choices=KERNELS, help="count this one again; without: all")
    parser.add_argument("--ring", action="store_true", help="a rank's whole ring, instead of pairs")
    parser.add_argument("--out", default=str(OUT), help=f"without: {OUT}")
    parser.add_argument("--docs", type=Path, help=f"the page with the tables; without: {DOCS}")
    parser.add_argument("--compile", nargs=8, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        what, generation, causal, *numbers = args.compile
        pair, (name, _, kind) = Pair(*map(int, numbers)), what.partition("_")
        if name == "splash":
            compile_splash(generation, causal == "1", pair)
        else:
            compile_xla(generation, kind, pair)
        return
    try:
        generations, kernels = find_generations(args.target, args.ring), find_kernels(args.kernel, args.ring)
        out = output_file(args.out)
        page = find_page(out, args.docs)
        read_targets(out)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if page is None:
        print(f"{DOCS} stays as it is: its tables are of {OUT} alone", flush=True)
    for generation in generations:
        known = read_targets(out)
        what, count = ("rings", rings) if args.ring else ("rows", rows)
        others = [row for row in known.get(generation, {}).get(what, ()) if row["kernel"] not in kernels]
        found = [*others, *count(generation, kernels)]
        said = {what: sorted(found, key=lambda row: KERNELS.index(row["kernel"]))}
        about = {
            "compiled_by": compiled_by(find_target(TARGETS[generation])),
            **made(),
        }
        content = {
            "what": "compiled: cycles of attention kernels, of a grid step and of a ring; nothing was run",
            "command": "python benchmarks/kernel_cycles.py [--ring]",
            "targets": known | {generation: known.get(generation, {}) | said | about},
        }
        write_results(out, content)
        if page:
            write_tables(page, content["targets"])


if __name__ == "__main__":
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    main()
