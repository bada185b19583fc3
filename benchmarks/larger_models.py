"""Compile train steps of models whose state does not fit on the devices, with parts of it in the host's memory, with
weights in bfloat16, and of TPU slices, or groups of GPUs, that a slower network joins.

    python benchmarks/larger_models.py                       # all: half a minute each; needs both compilers
    python benchmarks/larger_models.py --only=llama3_70b     # those with this in their name

A row is what `ringformer estimate` says, and holds that command; what is in --out already is not compiled again (delete
its entry to have it again). The table in --docs, between its two marks, is written anew each time.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.choices.candidates import offloading
from ringformer.estimate.closed_forms.training import peak_bytes
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.reports.report import estimate_json
from ringformer.estimate.workloads.targets import compiled_by, find_target, with_group_network, with_host_memory
from ringformer.estimate.workloads.training import Workload, estimate_command, preset_workload
from ringformer.hardware import GiB
from ringformer.runs.choices import Offload


class Case(NamedTuple):
    """A train step: a preset on a target, and where its state is."""

    model: str
    target: str
    mesh_dim: str
    batch_size: int
    seq_len: int
    state: Offload
    settings: tuple[tuple[str, int | bool | str], ...] = ()
    host_gib: float | None = None
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    group_gb_per_s: float | None = None

    @property
    def name(self) -> str:
        words = [self.model, self.target, str(self.seq_len), self.state]
        if self.params_dtype != "float32":
            words.append(self.params_dtype)
        return " ".join(words)

    def workload(self) -> Workload:
        target = with_host_memory(find_target(self.target), self.host_gib)
        target = with_group_network(target, self.group_gb_per_s)
        workload = preset_workload(self.model, target, self.seq_len, **dict(self.settings))
        workload = replace(workload, mesh_dim=self.mesh_dim, batch_size=self.batch_size).with_kernel()[0]
        optimizer = replace(workload.optimizer, params_dtype=self.params_dtype)
        return offloading(replace(workload, optimizer=optimizer), self.state)


LONG = (("offload", True), ("head_groups", 8))
KEPT_OUTPUTS = (*LONG, ("remat", "attention"))
SOME_OUTPUTS = (
    ("offload", True),
    ("fetch_ahead", False),
    ("head_groups", 4),
    ("remat", "attention"),
    ("full_remat_layers", 26),
)
CASES = (
    Case("llama3_8b", "8xH100", "1,8,1,1", 8, 8192, "none"),
    Case("llama3_8b", "8xH100", "1,8,1,1", 8, 8192, "moments"),
    Case("llama3_8b", "8xH100", "1,8,1,1", 8, 8192, "state"),
    Case("llama3_8b", "8xH100", "1,8,1,1", 8, 8192, "all"),
    Case("llama3_8b", "8xH100", "1,8,1,1", 8, 8192, "none", params_dtype="bfloat16"),
    Case("llama3_8b", "v5p-128", "1,64,1,1", 64, 8192, "none"),
    Case("llama3_8b", "v5p-128", "1,64,1,1", 64, 8192, "moments"),
    Case("llama3_8b", "v5p-128", "1,64,1,1", 64, 8192, "state"),
    Case("llama3_8b", "2xv5p-128", "2,64,1,1", 128, 8192, "none"),
    Case("llama3_8b", "2x8xH100", "2,8,1,1", 16, 8192, "none", group_gb_per_s=1.6),
    Case("llama3_8b", "1xH100", "1,1,1,1", 1, 2**18, "state", LONG, 1900),
    Case("llama3_8b", "1xH100", "1,1,1,1", 1, 2**19, "state", LONG, 1900),
    Case("llama3_8b", "1xH100", "1,1,1,1", 1, 2**19, "all", LONG, 1900),
    Case("qwen3_32b", "8xH100", "1,1,1,8", 1, 2**20, "moments", LONG),
    Case("qwen3_32b", "8xH100", "1,1,2,4", 1, 2**20, "state", SOME_OUTPUTS),
    Case("qwen3_32b", "8xH100", "1,1,1,8", 1, 2**20, "all", KEPT_OUTPUTS, 320),
    Case("llama3_70b", "8xH100", "1,1,1,8", 1, 2**17, "state", LONG),
)

BEGIN, END = "<!-- larger models: written by benchmarks/larger_models.py -->", "<!-- end of larger models -->"


def compile_case(case: Case) -> dict:
    """The row of a case; raises MissingCompiler and CompilerFailure."""
    workload = case.workload()
    row = estimate_json(workload, compile_apart(workload))
    for listed in ("hops_model", "collectives", "collective_groups", "largest_buffers"):
        del row[listed]
    closed = {"closed_form_peak_bytes": round(peak_bytes(workload))}
    origin = {"command": estimate_command(workload), **made(), "compiled_by": compiled_by(workload.target)}
    return {"model": case.model, "target": case.target, "state": case.state} | row | closed | origin


def table(rows: dict[str, dict]) -> str:
    """Format the table of compiled cases."""
    lines = ["| model | on | tokens | in host memory | each device, GiB | its host, GiB | step | |", "|---" * 8 + "|"]
    for case in CASES:
        row = rows.get(case.name)
        elsewhere = find_target(case.target).slices > 1 or case.params_dtype != "float32"
        if row is None or elsewhere:
            continue
        seconds = row["step_seconds_model"]
        step = "-" if seconds is None else f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
        whole = f"{row['peak_bytes'] / GiB:.1f} of {row['hbm_bytes'] / GiB:.1f}"
        sequences = f"{case.batch_size} x " if case.batch_size > 1 else ""
        lines.append(
            f"| {case.model} | {case.target} | {sequences}{case.seq_len:,} | {case.state} | {whole} | "
            f"{row['host_bytes'] / GiB:.1f} | {step} | {'fits' if row['fits'] else 'does not fit'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/larger_models.json")
    parser.add_argument("--docs", type=Path, default=Path("docs/memory.md"))
    parser.add_argument("--only", default="", help="cases with this in their name")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["steps"] if args.out.exists() else {}
    for case in CASES:
        if args.only in case.name and case.name not in rows:
            print(case.name, flush=True)
            rows[case.name] = compile_case(case)
            content = {
                "what": "compiled: train steps with parts of the state in host memory, with weights in bfloat16, and "
                "on joined slices or groups; bytes of one device; seconds are modelled from the compiled schedule",
                "command": "python benchmarks/larger_models.py",
                "steps": rows,
            }
            write_results(args.out, content)
    write_table(args.docs, BEGIN, table(rows), END)


if __name__ == "__main__":
    main()
