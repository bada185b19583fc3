"""Steps that others measured, of MaxText on TPUs and of TRL on GPUs, beside ours for the same sizes:
results/published_steps.json.

    python benchmarks/published_steps.py                # all; half a minute each
    python benchmarks/published_steps.py --only=v5p     # those with this in their name

Theirs: Llama-3.1-8B with 16 heads of 256 features and 4 key heads, on 64 chips (AI-Hypercomputer/tpu-recipes,
training/{v5p,ironwood}/Llama3.1-8B-LongContext-Maxtext, October 2026). Ours is compiled for the same shape, mesh and
batch, and its seconds are modelled; the settings are frozen in `ROWS`: like theirs, steps keep the output of attention
and gather weights asynchronously. Their kernel is splash attention with blocks of `BLOCKS`. So on v5p the ratio is that
of our step with attention as much slower as the cycles of splash (JAX's, fused backward) are more than those of our
kernels. Our own step, and that of LLaMA-3.1 8B as we ship it (32 heads of 128), stand beside it.

TRL's steps are of one sequence over a ring of all GPUs, with full rematerialisation (huggingface/trl#6845). Ours is the
same step: its kernel is the same cuDNN attention, so its seconds are compared as they are.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kernel_cycles import KINDS, count_ours, count_splash
from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.kernels.kernel_cycles import with_machine_code
from ringformer.estimate.kernels.pair_kernels import Kind, Pair
from ringformer.estimate.reports.time_report import mfu, modelled_time, seconds_by_purpose
from ringformer.estimate.seconds.program_seconds import ATTENTION
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.estimate.workloads.training import Workload, preset_workload
from ringformer.models.families.llama import LlamaConfig, preset

SHAPE = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 256}
"""Heads of their model; its width, layers and parameters are those of LLaMA-3.1 8B."""
BLOCKS = {"v5p": (1024, 1024)}
"""Queries and keys of a block of their kernel. Those of tpu7x, 2048 x 2048, are not counted: JAX's splash reaches 41%
of the units there, and Tokamax's, which they use, may reach more."""
PURPOSES = {
    "forward": (f"{ATTENTION} forward", f"{ATTENTION} recomputed"),
    "backward": (f"{ATTENTION} backward",),
}
"""Purposes of a step's seconds that each kernel takes."""

BEGIN, END = "<!-- published steps: written by benchmarks/published_steps.py -->", "<!-- end of published steps -->"
BEGIN_GPU = "<!-- published GPU steps: written by benchmarks/published_steps.py -->"
END_GPU = "<!-- end of published GPU steps -->"


class Row(NamedTuple):
    """A step that was measured, and our settings for it."""

    target: str
    seq_len: int
    sp: int
    """Their context parallelism."""
    batch: int
    """Sequences of a step, over all chips."""
    seconds: float
    """Measured; the middle of a range."""
    mfu: float
    """As published, with causal attention halved."""
    remat: str = "attention"

    @property
    def name(self) -> str:
        return f"{self.target}/{self.seq_len // 1024}K"


ROWS = (
    Row("v5p-128", 2**16, 4, 32, 10.25, 0.673),
    Row("v5p-128", 2**18, 16, 8, 26.31, 0.681),
    Row("v5p-128", 2**20, 64, 2, 93.0, 0.668),
    Row("v5p-128", 2**21, 64, 2, 352.0, 0.688),
    Row("v5p-128", 2**22, 64, 2, 1366.0, 0.699),
    Row("v5p-128", 10 * 2**20, 64, 1, 8056.0, 0.367, "full"),
    Row("v5p-128", 14 * 2**20, 64, 1, 15623.0, 0.371, "full"),
    Row("tpu7x-128", 2**20, 128, 4, 48.5, 0.509),
    Row("tpu7x-128", 2**22, 128, 1, 186.0, 0.509),
    Row("tpu7x-128", 10 * 2**20, 128, 1, 1124.0, 0.525),
    Row("tpu7x-128", 2**24, 128, 1, 3083.0, 0.488),
)
"""On v5p at a batch of 1 (10M and 14M), their kernel uses one TensorCore of two (maxtext#4755). Of tpu7x, the number of
sequences follows from seconds and MFU; the cores of a chip are two devices there."""


class GpuRow(NamedTuple):
    """A step of TRL that was measured, and our settings for it."""

    preset: str
    target: str
    seq_len: int
    seconds: float
    """Measured."""
    settings: dict[str, Any]
    """What keeps our step within a GPU's memory, beside full rematerialisation."""

    @property
    def name(self) -> str:
        return f"{self.target}/{self.preset}/{self.seq_len // 1024}K"


OFFLOADED = {"offload": True, "head_groups": 4}
GPU_ROWS = (
    GpuRow("qwen3_0.6b", "8xH100", 2**20, 137.0, {}),
    GpuRow("qwen3_0.6b", "8xH100", 2**22, 2135.0, {"head_groups": 2}),
    GpuRow("qwen3_8b", "8xH100", 2**20, 380.0, OFFLOADED),
    GpuRow("qwen3_8b", "16xH100", 2**21, 696.0, OFFLOADED),
    GpuRow("qwen3_8b", "32xH100", 2**22, 1346.0, OFFLOADED),
    GpuRow("qwen3_32b", "8xH100", 2**20, 1295.0, {"offload": True, "head_groups": 8}),
)


@cache
def splash_over_ours(generation: str, kind: Kind, q_chunk: int, k_chunk: int) -> float:
    """Return the cycles of their kernel over those of ours, for the same queries and keys without a mask."""
    shape = SHAPE["head_dim"], SHAPE["num_heads"] // SHAPE["num_kv_heads"]
    theirs, ours = Pair(*BLOCKS[generation], *shape), Pair(q_chunk, k_chunk, *shape)
    splash, pallas = count_splash(generation, kind, theirs)["whole"], count_ours(generation, kind, ours)["whole"]
    return splash.cycles / theirs.ideal_cycles(generation, kind) / (pallas.cycles / ours.ideal_cycles(generation, kind))


def compile_row(row: Row, shape: dict) -> dict:
    """Compile a step of our model for a row; return its seconds and what they are based on. With their shape on a chip
    of `BLOCKS`, the seconds that it would take with their kernel are among them."""
    target = find_target(row.target)
    model = LlamaConfig(**preset("llama3.1_8b") | shape | {"remat": row.remat, "kernel": "pallas"})
    mesh_dim = f"1,{target.num_devices // row.sp},1,{row.sp}"
    workload = Workload(model, target, mesh_dim, row.seq_len, row.batch).with_kernel()[0]
    estimate = with_machine_code(workload, compile_apart(workload), print)
    time = modelled_time(workload, estimate)
    assert time and estimate.schedule, f"{row.name} has a schedule"
    chunks = workload.model.q_chunk, workload.model.k_chunk
    compiled = {
        "fits": estimate.fits,
        "peak_bytes": estimate.peak_bytes,
        "seconds": time.step,
        "exposed_seconds": time.exposed,
        "mfu_causal": mfu(workload, time)["causal"],
        "chunks": chunks,
        "compiled_by": compiled_by(target),
        **made(),
    }
    if shape == SHAPE and target.generation in BLOCKS:
        slower = {kind: splash_over_ours(target.generation, kind, *chunks) for kind in KINDS}
        attention = {
            kind: sum(s for name, s in seconds_by_purpose(estimate.schedule).items() if name in PURPOSES[kind])
            for kind in KINDS
        }
        more = sum(attention[kind] * (slower[kind] - 1) for kind in KINDS)
        compiled |= {
            "attention_seconds": attention,
            "splash_over_ours": slower,
            "seconds_with_splash": time.step + more,
        }
    return compiled


def compile_gpu_row(row: GpuRow) -> dict:
    """Compile our step of a row of GPUs; return the measured seconds and ours."""
    target = find_target(row.target)
    workload = preset_workload(row.preset, target, row.seq_len, remat="full", **row.settings).with_kernel()[0]
    estimate = compile_apart(workload)
    time = modelled_time(workload, estimate)
    assert time, f"{row.name} has a schedule"
    return {
        **{name: getattr(row, name) for name in ("preset", "target", "seq_len", "settings")},
        "measured_seconds": row.seconds,
        "seconds": time.step,
        "exposed_seconds": time.exposed,
        "mfu_causal": mfu(workload, time)["causal"],
        "seconds_source": time.source,
        "peak_bytes": estimate.peak_bytes,
        "fits": estimate.fits,
        "compiled_by": compiled_by(target),
        **made(),
    }


def gpu_table(rows: dict[str, dict]) -> str:
    """Format the rows of GPUs in markdown."""
    lines = ["| model | GPUs | context | measured s | ours s | ratio | MFU (causal) |", "|---" * 7 + "|"]
    for row in rows.values():
        measured = row["measured_seconds"]
        cells = [
            row["preset"],
            row["target"],
            f"{row['seq_len']:,}",
            f"{measured:,.0f}",
            f"{row['seconds']:,.0f}",
            f"{row['seconds'] / measured:.2f}",
            f"{row['mfu_causal']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: dict[str, dict]) -> str:
    """Format the rows in markdown."""
    lines = [
        "| chips | context | ring | sequences | measured s | MFU (causal) | with their kernel s | ratio | ours s "
        "| ratio | MFU (causal) | ours, heads of 128 s |",
        "|---" * 12 + "|",
    ]
    for row in rows.values():
        ours, own, measured = row["ours"], row["ours_as_shipped"], row["measured_seconds"]
        splash = ours.get("seconds_with_splash")  # counted on the chips of BLOCKS
        cells = [
            row["target"],
            f"{row['seq_len']:,}",
            str(row["sp"]),
            str(row["batch"]),
            f"{measured:,.1f}",
            f"{row['measured_mfu_causal']:.1%}",
            f"{splash:,.1f}" if splash else "not counted",
            f"{splash / measured:.2f}" if splash else "",
            f"{ours['seconds']:,.1f}",
            f"{ours['seconds'] / measured:.2f}",
            f"{ours['mfu_causal']:.1%}",
            f"{own['seconds']:,.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default=Path("results/published_steps.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/estimating.md"))
    parser.add_argument("--only", default="", help="rows with this in their name; none writes the table alone")
    args = parser.parse_args()
    only_compilers()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = found.get("rows", {})
    gpu_rows = found.get("gpu_rows", {})

    def write() -> None:
        content = {
            "what": "measured: MaxText's and TRL's steps, by their authors; compiled, seconds modelled: ours",
            "command": "python benchmarks/published_steps.py",
            "source": "AI-Hypercomputer/tpu-recipes, October 2026: training/v5p and training/ironwood, "
            "Llama3.1-8B-LongContext-Maxtext; huggingface/trl#6845",
            "rows": {row.name: rows[row.name] for row in ROWS if row.name in rows},
            "gpu_rows": {row.name: gpu_rows[row.name] for row in GPU_ROWS if row.name in gpu_rows},
        }
        write_results(args.out, content)

    for row in ROWS:
        if args.only not in row.name:
            continue
        ours, own = compile_row(row, SHAPE), compile_row(row, {})
        rows[row.name] = {
            **{name: getattr(row, name) for name in ("target", "seq_len", "sp", "batch", "remat")},
            "measured_seconds": row.seconds,
            "measured_mfu_causal": row.mfu,
            "ours": ours,
            "ours_as_shipped": own,
        }
        print(row.name, ours["seconds"] / row.seconds, flush=True)
        write()
    for gpu_row in GPU_ROWS:
        if args.only not in gpu_row.name:
            continue
        gpu_rows[gpu_row.name] = compile_gpu_row(gpu_row)
        print(gpu_row.name, gpu_rows[gpu_row.name]["seconds"] / gpu_row.seconds, flush=True)
        write()
    write_table(args.docs, BEGIN, table(rows), END)
    write_table(args.docs, BEGIN_GPU, gpu_table(gpu_rows), END_GPU)


if __name__ == "__main__":
    main()
