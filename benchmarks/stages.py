"""Compile every stage of the shipped configs for its hardware, and write what each takes.

    python benchmarks/stages.py                                        # all: minutes for each stage
    python benchmarks/stages.py --only=llama3_8b_1m_8xh200/stage-1     # one

Each stage is a `ringformer estimate` in a process of its own; what is in --out already is not compiled again (delete
its entry to have it again). The table in --docs, between its two marks, is written anew each time.
"""

import argparse
import datetime
import json
from pathlib import Path

from ringformer.cli import load_config
from ringformer.estimate.longest_context import compiled_by, run
from ringformer.hardware import GiB
from ringformer.train.config_files import parse_stages

SHIPPED = {
    "llama_13b_512k_32xa100": "32xA100-80",
    "llama3_8b_512k_8xh100": "8xH100",
    "llama3_8b_1m_8xh200": "8xH200",
    "llama_13b_512k_v5e_256": "v5e-256",
    "lwm_7b_1m": "v4-512",
}
"""Configs and the hardware that they are for."""

BEGIN, END = "<!-- stages: written by benchmarks/stages.py -->", "<!-- end of stages -->"


def cases() -> list[tuple[str, list[str]]]:
    """The name and the command of every stage."""
    found = []
    for name, target in SHIPPED.items():
        path = f"configs/{name}.py"
        for n in range(1, len(parse_stages(load_config([f"--config={path}"]), inherit=False)) + 1):
            command = ["ringformer", "estimate", f"--config={path}", f"--target={target}", f"--stage={n}", "--json"]
            found.append((f"{name}/stage-{n}", command))
    return found


def compile_stage(command: list[str]) -> dict:
    """The row of a stage; raises RuntimeError if the compiler is missing or broke down."""
    row = run(command)
    if row["closed_form"]:
        raise RuntimeError(f"{' '.join(command)}: no compiler, closed forms alone; pip install what the target needs: "
                           "libtpu for TPUs, 'jax[cuda13]' for GPUs")  # fmt: skip
    del row["hops_model"]
    return row | {"command": " ".join(command), "date": datetime.date.today().isoformat(),
                  "compiled_by": compiled_by(" ".join(command))}  # fmt: skip


def read(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text())["stages"] if path.exists() else {}


def write(path: Path, rows: dict[str, dict]) -> None:
    content = {"what": "compiled: the train step of every stage; bytes of one device; seconds, days and device-hours "
               "are modelled from the compiled schedule", "command": "python benchmarks/stages.py",
               "stages": dict(sorted(rows.items()))}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def table(rows: dict[str, dict]) -> str:
    """The rows in markdown, those that are not compiled yet left empty."""
    lines = ["| config, stage | context | sequences | mesh | tokens | peak GiB | of | host GiB | s/step | days | "
             "device-hours | compiled |", "|---|" + "---|" * 11]  # fmt: skip
    for name, _ in cases():
        r = rows.get(name)
        if r is None:
            lines.append(f"| {name} " + "| " * 10 + "| not compiled yet |")
            continue
        memory = f"{r['peak_bytes'] / GiB:.1f}" + ("" if r["fits"] else " (does not fit)")
        seconds, days, hours = (r["step_seconds_model"], r.get("days_model"), r.get("device_hours_model"))
        times = " | ".join("-" if x is None else f"{x:,.{d}f}" for x, d in ((seconds, 1), (days, 2), (hours, 0)))
        lines.append(
            f"| {name} | {r['seq_len']:,} | {r['batch_size']} | {r['mesh_dim']} | {r['tokens'] / 1e6:,.0f}M | {memory} "
            f"| {r['hbm_bytes'] / GiB:.1f} | {r['host_bytes'] / GiB:.1f} | {times} | {r['compiled_by']}, {r['date']} |"
        )
    return "\n".join(lines)


def write_table(docs: Path, rows: dict[str, dict]) -> None:
    """Put the table between the two marks of a page."""
    text = docs.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{docs} has no marks for the table: {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    docs.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/stages.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/finetuning.md"))
    parser.add_argument("--only", default="", help="stages with this in their name; none writes the table alone")
    args = parser.parse_args()
    for name, command in cases():
        if args.only in name and name not in read(args.out):
            print(" ".join(command), flush=True)
            try:
                row = compile_stage(command)
            except RuntimeError as error:  # said, and not taken for an answer
                print(f"  {error}", flush=True)
                continue
            print(f"  {'fits' if row['fits'] else 'does not fit'}: {row['peak_bytes'] / GiB:.1f} GiB", flush=True)
            write(args.out, read(args.out) | {name: row})  # read anew, so that two of these can share the file
    write_table(args.docs, read(args.out))


if __name__ == "__main__":
    main()
