"""Facts of the compiled train steps of the shipped configs: what is computed and sent beside what is due.

    python benchmarks/compiled_facts.py                              # all; half a minute to three each
    python benchmarks/compiled_facts.py --only=olmo3_7b_64k/run      # one; the others of the file stay

Each row is a stage at its longest context, compiled for its hardware:

- matrix FLOPs over the closed form (`executed_flops`): above 1 by what a mask or a window computes and need not;
- bytes of gathered weights and of summed gradients over those of the model's weights, twice in the compute dtype (once
  forward, once for the backward) and once in float32. Sums of all-reduces count twice, as they are sent;
- collectives of more than a megabyte that are synchronous, which no work can hide.

It writes results/compiled_facts.json, and the table in docs/overlap.md.
"""

import argparse
import json
import math
from pathlib import Path

from benchmarks.result_files import made, write_results
from benchmarks.stages import stages
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.closed_forms.training import itemsize
from ringformer.estimate.compiler.collectives import purpose
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.targets import compiled_by, find_target
from ringformer.estimate.workloads.training import Workload, preset_workload
from ringformer.models.flops import executed_flops

LARGE = 1e6
"""Bytes of a collective that counts as large."""
STAGES = (
    "llama3_8b_512k_8xh100/stage-2",
    "llama3_8b_512k_lora_8xh100/run",
    "llama_13b_512k_v5e_256/stage-3",
    "lwm_7b_1m/stage-5",
    "olmo3_7b_64k/run",
)
EIGHT_B = "llama3_8b on v5p-128, 1M"
BEGIN = "<!-- compiled facts: written by benchmarks/compiled_facts.py -->"
END = "<!-- end of compiled facts -->"


def workloads() -> dict[str, Workload]:
    """Return the workloads by the names of their rows."""
    found = {name: stages()[name][0] for name in STAGES}
    found[EIGHT_B] = preset_workload("llama3_8b", find_target("v5p-128"), 2**20, remat="attention").with_kernel()[0]
    return found


def facts(workload: Workload) -> dict:
    """Compile a step and return its facts."""
    schedule = compile_apart(workload).schedule
    assert schedule is not None, "it fits"
    model = workload.model
    sent = {"weights gathered": 0.0, "gradients reduced": 0.0}
    synchronous = []
    for t in schedule.transfers:
        of = purpose(t)
        if of in sent and math.prod(t.shape) > model.hidden_size:  # vectors are replicated
            sent[of] += t.all_bytes
        if not t.asynchronous and t.bytes > LARGE:
            synchronous.append(
                {"purpose": of, "kind": t.kind, "bytes": t.bytes, "count": t.count, "seconds": t.seconds}
            )
    each = workload.batch_size / workload.target.num_devices
    due = executed_flops(model, workload.seq_len, frozen=workload.lora.rank > 0) * each
    return {
        "target": workload.target.name,
        "seq_len": workload.seq_len,
        "mesh_dim": workload.mesh_dim,
        "remat": model.remat,
        "flops_over_closed_form": schedule.flops / due,
        "gathered_bytes": sent["weights gathered"],
        "gathered_over_weights": sent["weights gathered"]
        / (2 * itemsize(model) * model.num_params * workload.accumulate),
        "reduced_bytes": sent["gradients reduced"],
        "reduced_over_weights": sent["gradients reduced"] / (4 * workload.trained_params * workload.accumulate),
        "synchronous": synchronous,
        "exposed_seconds": schedule.exposed_seconds,
        "seconds": schedule.seconds.overlapped + schedule.exposed_seconds + schedule.host_seconds,
        "compiled_by": compiled_by(workload.target),
        **made(),
    }


def table(rows: dict[str, dict]) -> str:
    """Format the rows in markdown."""
    lines = [
        "| step | chips | FLOPs over the closed form | gathered over weights | summed over gradients "
        "| synchronous above 1 MB | exposed |",
        "|---" * 7 + "|",
    ]
    for name, row in rows.items():
        kinds: dict[str, float] = {}
        for each in row["synchronous"]:
            kinds[each["kind"]] = kinds.get(each["kind"], 0) + each["count"]
        cells = [
            name,
            row["target"],
            f"{row['flops_over_closed_form']:.3f}",
            f"{row['gathered_over_weights']:.2f}",
            f"{row['reduced_over_weights']:.2f}",
            ", ".join(f"{count:,.0f} {kind}" for kind, count in kinds.items()) or "none",
            f"{row['exposed_seconds'] / row['seconds']:.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default=Path("results/compiled_facts.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/overlap.md"))
    parser.add_argument("--only", default="", help="rows with this in their name; none writes the table alone")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    every = workloads()
    for name, workload in every.items():
        if args.only not in name:
            continue
        rows[name] = facts(workload)
        print(name, json.dumps(rows[name]), flush=True)
        content = {
            "what": "compiled: train steps of the shipped configs; seconds modelled from the schedule",
            "command": "python benchmarks/compiled_facts.py",
            "rows": {each: rows[each] for each in every if each in rows},
        }
        write_results(args.out, content)
    write_table(args.docs, BEGIN, table({each: rows[each] for each in every if each in rows}), END)


if __name__ == "__main__":
    main()
