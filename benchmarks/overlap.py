"""Is the ring hidden? The train step of a small model, compiled for four kinds of TPU at several local lengths.

    python benchmarks/overlap.py --out results/overlap.json --figure docs/figures/overlap.svg

Needs `libtpu` and no TPU. For each hop inside the ring's loops it records the seconds on the link and the seconds of
computation that the compiler scheduled between its start and its end; the picture shows their ratio beside the closed
form (2 and 2.4 F/B, docs/overlap.md). All of it is compiled, nothing measured.
"""

import argparse
import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from benchmarks.paper_page.figures import draw_overlap
from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.estimate.closed_forms.training import smallest_local_length
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig

TARGETS = ("v4:2x2x2", "v5e:4x2", "v5p:2x2x2", "v6e:4x2")
LENGTHS = (8192, 16384, 32768)
MODEL = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=128
)


def compile_rows(lengths: tuple[int, ...]) -> list[dict]:
    rows = []
    for name in TARGETS:
        target = find_target(name)
        for local in lengths:
            estimate = compile_apart(Workload(MODEL, target, "1,1,1,-1", local * target.num_devices))
            hops = [
                t for t in estimate.schedule.transfers if t.in_ring_loop and t.dtype != "s32"
            ]  # not the segment ids
            row = {
                "target": name,
                "local": local,
                "max_link_hops": int(estimate.max_link_hops),
                "asynchronous": all(t.asynchronous for t in hops),
            }
            # Gradients (f32) travel with the backward's keys; the other two loops carry keys alone.
            gradients = [t.cover / t.seconds for t in hops if t.dtype == "f32"]
            keys = sorted(t.cover / t.seconds for t in hops if t.dtype == "bf16")
            row["forward_cover_over_link"] = round(keys[1], 3)  # the worse of the forward and the recomputed forward
            row["backward_cover_over_link"] = round(min(keys[0], *gradients), 3)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/overlap.json")
    parser.add_argument("--figure", default="docs/figures/overlap.svg")
    parser.add_argument("--lengths", type=lambda s: tuple(map(int, s.split(","))), default=LENGTHS)
    args = parser.parse_args()
    rows = compile_rows(args.lengths)
    what = "compiled: computation between start and end of a hop over its time on the link, both at peak rates"
    result = {
        "what": what,
        "command": "python benchmarks/overlap.py",
        **made(),
        "versions": {p: version(p) for p in ("jax", "libtpu")},
        "rows": rows,
    }
    write_results(args.out, result)
    smallest = {
        (name, p): smallest_local_length(MODEL, find_target(name).chip, backward=p == "backward")
        for name in TARGETS
        for p in ("forward", "backward")
    }
    draw_overlap(rows, smallest, path=args.figure)


if __name__ == "__main__":
    main()
