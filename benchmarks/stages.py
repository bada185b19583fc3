"""Compile every stage of the shipped configs for its hardware, and write what each takes.

    python benchmarks/stages.py                                        # all: minutes for each stage
    python benchmarks/stages.py --only=llama3_8b_1m_8xh200/stage-1     # one

A row is what `ringformer estimate` says of the stage, and holds that command; what is in --out already is not compiled
again (delete its entry to have it again). The tables in --docs, each between its two marks, are written anew each time.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.kernels.kernel_cycles import with_machine_code
from ringformer.estimate.reports.report import estimate_json
from ringformer.estimate.workloads.targets import MissingCompiler, compiled_by, find_target
from ringformer.estimate.workloads.training import Workload, stage_workloads
from ringformer.hardware import GiB
from ringformer.hardware.shares import SHARES
from ringformer.runs.config_file import load_config, parse_stages


class Recipe(NamedTuple):
    """A shipped config: the hardware that it is for, the model that it starts with, and what it follows."""

    target: str
    start: str
    follows: str


RING_ATTENTION = "[Ring Attention](https://arxiv.org/abs/2310.01889), section 5.3"
GRADIENT = "Gradient AI's LLaMA-3 8B"
ULTRALONG = "[UltraLong](https://arxiv.org/abs/2504.06214)"
SHIPPED = {
    "llama_13b_512k_32xa100": Recipe("32xA100-80", "LLaMA-13B, 2K", RING_ATTENTION),
    "llama3_8b_512k_8xh100": Recipe("8xH100", "LLaMA-3.1 8B, 128K", GRADIENT),
    "llama3_8b_512k_lora_8xh100": Recipe("8xH100", "LLaMA-3.1 8B, 128K", f"none: adapters, theta of {GRADIENT}"),
    "qwen3_8b_512k_8xh100": Recipe("8xH100", "Qwen3 8B, 32K", f"none: YaRN in one step, as {ULTRALONG}"),
    "qwen3_8b_512k_lora_8xh100": Recipe("8xH100", "Qwen3 8B, 32K", "none: adapters, YaRN"),
    "llama3_8b_1m_8xh200": Recipe("8xH200", "LLaMA-3.1 8B, 128K", GRADIENT),
    "ultralong_8b_1m": Recipe("64xH100", "LLaMA-3.1 8B Instruct, 128K", ULTRALONG),
    "ultralong_8b_4m": Recipe("64xH100", "LLaMA-3.1 8B Instruct, 128K", ULTRALONG),
    "llama_13b_512k_v5e_256": Recipe("v5e-256", "LLaMA-13B, 2K", RING_ATTENTION),
    "lwm_7b_1m": Recipe("v4-512", "LLaMA-2 7B, 4K", "[Large World Model](https://arxiv.org/abs/2402.08268)"),
    "olmo3_7b_64k": Recipe(
        "v5p-128",
        "OLMo 3 7B after midtraining, 8K",
        "[OLMo 3](https://arxiv.org/abs/2512.13961), [ProLong](https://arxiv.org/abs/2410.02660)",
    ),
}

BEGIN, END = "<!-- stages: written by benchmarks/stages.py -->", "<!-- end of stages -->"
RECIPES, END_OF_RECIPES = "<!-- recipes: written by benchmarks/stages.py -->", "<!-- end of recipes -->"


def stages() -> dict[str, tuple[Workload, str]]:
    """Every stage by its name, with the command that estimates it; a config without stages is one, "run"."""
    named = {}
    for name, recipe in SHIPPED.items():
        path = f"configs/{name}.py"
        config = load_config(path, [])
        configs = parse_stages(config, inherit=False)
        for n, workload in enumerate(stage_workloads(configs, find_target(recipe.target)), 1):
            stage = (f"stage-{n}", f" --stage={n}") if config.stages else ("run", "")
            command = f"ringformer estimate --config={path} --target={recipe.target}{stage[1]} --json"
            named[f"{name}/{stage[0]}"] = workload.with_kernel()[0], command
    return named


def compile_stage(workload: Workload, command: str) -> dict:
    """The row of a stage; raises MissingCompiler, and CompilerFailure if the compiler broke down."""
    row = estimate_json(workload, with_machine_code(workload, compile_apart(workload), print))
    for listed in ("hops_model", "collectives", "collective_groups", "largest_buffers"):
        del row[listed]
    return row | {
        "stage": workload.name,
        "command": command,
        **made(),
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
    write_results(part, content)
    part.replace(path)


def recipes(rows: dict[str, dict]) -> str:
    """Format the table of shipped configs, with the context of the last stage and the tokens and days of all."""
    lines = ["| config | follows | starts with | context | tokens | hardware | days |", "|---" * 7 + "|"]
    every = stages()
    for config, recipe in SHIPPED.items():
        names = [name for name in every if name.startswith(f"{config}/")]
        workloads = [every[name][0] for name in names]
        tokens = sum(w.tokens for w in workloads)
        amount = f"{tokens / 1e9:.2f}B" if tokens > 1e9 else f"{tokens / 1e6:.0f}M"
        compiled = all(name in rows for name in names)
        days = f"{sum(rows[name]['days_model'] for name in names):.2f}" if compiled else "not compiled yet"
        lines.append(
            f"| [{config}](../configs/{config}.py) | {recipe.follows} | {recipe.start} | {workloads[-1].seq_len:,} | "
            f"{amount} | {recipe.target} | {days} |"
        )
    return "\n".join(lines)


def table(rows: dict[str, dict]) -> str:
    """Format a markdown table per config; stages that were not compiled yet have empty cells."""
    parts, every = [], stages()
    for config, (target, *_) in SHIPPED.items():
        names = [name for name in every if name.startswith(f"{config}/")]
        compiled = {f"{r['compiled_by']}, {r['date']}": None for r in (rows.get(name) for name in names) if r}
        found = find_target(target)
        memory = found.chip.hbm_bytes / GiB
        shares = SHARES[found.generation]
        parts.append(
            f"**{config}** on {target}, {memory:.1f} GiB per device; seconds by "
            f"[shares of the peaks](estimating.md#shares-of-the-peaks), {shares}:\n\n"
            "| stage | context | batch | mesh | tokens | peak GiB | host GiB | s/step | tokens/s | MFU (causal) "
            "| days | device-hours |\n"
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
    write_table(args.docs, RECIPES, recipes(read(args.out)), END_OF_RECIPES)
    write_table(args.docs, BEGIN, table(read(args.out)), END)


if __name__ == "__main__":
    main()
