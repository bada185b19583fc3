"""Compile every stage of the shipped configs for its hardware, and write what each takes.

    python benchmarks/stages.py                                        # all: minutes for each stage
    python benchmarks/stages.py --only=llama3_8b_1m_8xh200/stage-1     # one

A row is what `ringformer estimate` says of the stage, and holds that command; what is in --out already is not compiled
again (delete its entry to have it again). The table in --docs, between its two marks, is written anew each time.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

from ringformer.cli.parser import output_argument
from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.report import estimate_json
from ringformer.estimate.seconds.kernel_cycles import with_machine_code
from ringformer.estimate.targets import MissingCompiler, compiled_by, find_target
from ringformer.estimate.workload import Workload, stage_workloads
from ringformer.hardware import GiB
from ringformer.runs.config_file import load_config, parse_stages

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.tables import write_table

SHIPPED = {
    "llama_13b_512k_32xa100": "32xA100-80",
    "llama3_8b_512k_8xh100": "8xH100",
    "llama3_8b_1m_8xh200": "8xH200",
    "llama_13b_512k_v5e_256": "v5e-256",
    "lwm_7b_1m": "v4-512",
}
"""Configs and the hardware that they are for."""

BEGIN, END = "<!-- stages: written by benchmarks/stages.py -->", "<!-- end of stages -->"


def stages() -> dict[str, tuple[Workload, str]]:
    """Every stage by its name, with the command that estimates it."""
    named = {}
    for name, target in SHIPPED.items():
        path = f"configs/{name}.py"
        configs = parse_stages(load_config(path, []), inherit=False)
        for n, workload in enumerate(stage_workloads(configs, find_target(target)), 1):
            command = f"ringformer estimate --config={path} --target={target} --stage={n} --json"
            named[f"{name}/stage-{n}"] = workload.with_kernel()[0], command
    return named


def compile_stage(workload: Workload, command: str) -> dict:
    """The row of a stage; raises MissingCompiler, and CompilerFailure if the compiler broke down."""
    row = estimate_json(workload, with_machine_code(workload, compile_apart(workload), print))
    for listed in ("hops_model", "collectives", "collective_groups", "largest_buffers"):
        del row[listed]
    return row | {
        "stage": workload.name,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "compiled_by": compiled_by(workload.target),
    }


def read(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text())["stages"] if path.exists() else {}


def write(path: Path, rows: dict[str, dict]) -> None:
    content = {
        "what": "compiled: the train step of every stage; bytes of one device; seconds, days and device-hours "
        "are modelled from the compiled schedule",
        "command": "python benchmarks/stages.py",
        "stages": dict(sorted(rows.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def table(rows: dict[str, dict]) -> str:
    """Format a markdown table per config; stages that were not compiled yet have empty cells."""
    parts = []
    for config, target in SHIPPED.items():
        names = [name for name in stages() if name.startswith(f"{config}/")]
        compiled = {f"{r['compiled_by']}, {r['date']}": None for r in (rows.get(name) for name in names) if r}
        memory = find_target(target).chip.hbm_bytes / GiB
        parts.append(
            f"**{config}** on {target}, {memory:.1f} GiB per device:\n\n"
            "| stage | context | batch | mesh | tokens | peak GiB | host GiB | s/step | tokens/s | MFU | days | "
            "device-hours |\n"
            + "|---" * 12
            + "|\n"
            + "\n".join(table_row(name.partition("/")[2], rows.get(name)) for name in names)
            + f"\n\nCompiled by {'; '.join(compiled) or 'nothing yet'}."
        )
    return "\n\n".join(parts)


def table_row(stage: str, row: dict | None) -> str:
    """Format a stage's row."""
    if row is None:
        return f"| {stage} " + "| " * 10 + "| not compiled yet |"
    memory = f"{row['peak_bytes'] / GiB:.1f}" + ("" if row["fits"] else " (does not fit)")
    modelled = {
        "step_seconds_model": ",.1f",
        "tokens_per_second_model": ",.0f",
        "mfu_causal_model": ".0%",
        "days_model": ",.2f",
        "device_hours_model": ",.0f",
    }
    times = " | ".join("-" if row.get(key) is None else f"{row[key]:{form}}" for key, form in modelled.items())
    return (
        f"| {stage} | {row['seq_len']:,} | {row['batch_size']} | {row['mesh_dim']} | {row['tokens'] / 1e6:,.0f}M | "
        f"{memory} | {row['host_bytes'] / GiB:.1f} | {times} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default="results/stages.json")
    parser.add_argument("--docs", type=Path, default=Path("docs/finetuning.md"))
    parser.add_argument("--only", default="", help="stages with this in their name; none writes the table alone")
    args = parser.parse_args()
    for name, (workload, command) in stages().items():
        if args.only in name and name not in read(args.out):
            print(command, flush=True)
            try:
                row = compile_stage(workload, command)
            except (MissingCompiler, CompilerFailure) as error:  # said, and not taken for an answer
                print(f"  {error}", flush=True)
                continue
            print(f"  {'fits' if row['fits'] else 'does not fit'}: {row['peak_bytes'] / GiB:.1f} GiB", flush=True)
            write(args.out, read(args.out) | {name: row})  # read anew, so that two of these can share the file
    write_table(args.docs, BEGIN, table(read(args.out)), END)


if __name__ == "__main__":
    main()
