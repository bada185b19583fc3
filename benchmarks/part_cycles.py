"""Machine code judged: seconds by a part of the step against the whole step's, cycles against XLA's own estimates.

    python benchmarks/part_cycles.py [--only=v5e] [--out=results/part_cycles.json]

Compiled, not measured. A cell is one train step of a preset on a target, compiled to machine code twice, once with its
programs dumped until all of its matrix products are there: some ten CPU-minutes. What a cell said replaces what it said
before.
"""

import argparse
import json
import os
import re

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.estimate.closed_forms.training import step_time
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.kernels.kernel_cycles import generate_cycles, kernel_keys, with_machine_code
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import of_chunk_pairs, purpose
from ringformer.estimate.workloads.programs import TRAIN_STEP
from ringformer.estimate.workloads.targets import compiled_by, find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset

CELLS = {
    "v5e": ("v5e-256", "llama_7b", 2**22, 4),
    "v4": ("v4-1024", "llama_7b", 2**23, 4),
    "v5p": ("v5p-128", "llama_7b", 2**21, 4),
    "v6e": ("v6e-64", "llama_7b", 2**20, 4),
}
"""Target, preset, tokens of the one sequence, head groups."""


def products(scheduled: str, generated: str, cycles: dict[str, float]) -> list[dict]:
    """Each instruction with matrix products: its cycles, XLA's estimate of them, and what its FLOPs need at least."""
    estimated = dict(re.findall(r'^ +(?:ROOT )?%([\w.\-]+) = .*"estimated_cycles":"(\d+)"', generated, re.MULTILINE))
    program = Program.parse(scheduled)
    found: dict[str, dict] = {}
    for name, instruction, key in KernelKeys(program).kernels():
        flops = program.instruction_flops(name, instruction)
        if flops and key in cycles and instruction.name in estimated:
            row = found.setdefault(
                key,
                {
                    "instruction": instruction.name,
                    "purpose": purpose(instruction),
                    "chunk_pair": of_chunk_pairs(instruction),
                    "executed": 0.0,
                },
            )
            row["executed"] += program.executed[name]
            row |= {"flops": flops, "cycles": cycles[key], "xla_estimated_cycles": int(estimated[instruction.name])}
    return sorted(found.values(), key=lambda row: -row["executed"] * row["cycles"])


def seconds(workload: Workload, estimate: Estimate) -> dict:
    """Of a step, and by purpose."""
    assert estimate.schedule is not None
    time, whole = step_time(estimate.schedule, workload.step_tokens), estimate.schedule.seconds
    spent = {name: s.overlapped for name, s in estimate.schedule.purposes.items()}
    return {"seconds": time.step, "counted": whole.counted / whole.overlapped, "purposes": spent}


def judge(cell: tuple) -> dict:
    """What a cell says, by the part and by the whole."""
    target, model, seq_len, groups = cell
    config = LlamaConfig(**preset(model) | {"head_groups": groups})
    workload = Workload(config, find_target(target), "1,1,1,-1", seq_len, name=model)
    scheduled = compile_apart(workload)
    part = with_machine_code(workload, scheduled, print)
    assert scheduled.schedule is not None
    cycles = generate_cycles(workload, kernel_keys(Program.parse(scheduled.text)), TRAIN_STEP)
    text = compile_apart(workload, generate_code=True).text
    schedule = read_schedule(scheduled.text, scheduled.schedule.rates, cycles)
    whole = Estimate(**vars(scheduled) | {"schedule": schedule})
    chip = workload.target.chip
    cores = chip.tensor_cores
    assert cores is not None, "the cells are TPUs"
    rows = products(scheduled.text, text, cycles)
    for row in rows:
        row["share_of_peak"] = row["flops"] / (cores.count * cores.matrix_flops_per_cycle) / row["cycles"]
        row["of_xla_estimate"] = row["cycles"] / row["xla_estimated_cycles"]
    return {
        "target": target,
        "model": model,
        "seq_len": seq_len,
        "head_groups": groups,
        "by_parts": seconds(workload, part),
        "by_whole": seconds(workload, whole),
        "assumed": seconds(workload, scheduled),
        "products": rows,
        "compiled_by": compiled_by(workload.target),
        **made(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CELLS)
    parser.add_argument("--out", type=output_argument, default="results/part_cycles.json")
    args = parser.parse_args()
    for name, cell in CELLS.items():
        if args.only in (None, name):
            said = judge(cell)
            known = json.loads(args.out.read_text())["cells"] if args.out.exists() else {}
            about = "compiled: machine code of whole train steps and of their attention alone; nothing was run"
            content = {"what": about, "command": "python benchmarks/part_cycles.py", "cells": known | {name: said}}
            write_results(args.out, content)
            parts, whole = (said[k]["seconds"] for k in ("by_parts", "by_whole"))
            off = [r for r in said["products"] if not 1 / 1.4 <= r["of_xla_estimate"] <= 1.4]
            print(
                f"{name}: {parts:.1f} s by parts, {whole:.1f} s by the whole step's code ({parts / whole - 1:+.1%}); "
                f"{len(off)} of {len(said['products'])} products over 40% off XLA's estimate"
            )


if __name__ == "__main__":
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    main()
