"""Estimate a train step of each family on v5e-256 and 8xH100, and the longest contexts.

    python benchmarks/models.py [--only=PRESET] [--out=results/models.json] [--page=docs/models.md]

v5e-256: compiled for one sequence of 1M tokens, or the longest power of two that the compiler accepts; seconds are
modelled from the schedule. 8xH100: closed forms, not compiled. Longest contexts: closed forms, powers of two. Half a
minute to three a preset; what a preset said replaces what it said before, and the table in the page follows.
"""

import argparse
import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path

from ringformer.cli.parser import output_argument
from ringformer.estimate.closed_forms import step_time
from ringformer.estimate.command_tools import log
from ringformer.estimate.report import origin
from ringformer.estimate.search.candidates import candidates
from ringformer.estimate.search.memory_settings import compile_first_accepted, likely_settings
from ringformer.estimate.targets import find_target, only_compilers
from ringformer.estimate.workload import Workload, preset_workload
from ringformer.hardware import GiB

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.tables import write_table

PRESETS: dict[str, dict] = {
    "llama3_8b": {},
    "mistral_7b": {},
    "qwen2.5_7b": {},
    "qwen3_8b": {},
    "seed_oss_36b": {},
    "ministral3_8b": {},
    "smollm3_3b": {},
    "olmo3_7b": {},
    "gemma3_12b": {},
    "gemma3_12b, full attention": {"layer_types": "F", "window": 0},
}
"""Models, the last one with changes that show what its windows save."""

TPU, GPU, LENGTH = "v5e-256", "8xH100", 2**20
ORIGIN = {
    "what": "compiled to the schedule on TPU, seconds modelled from it; closed forms on GPU, and for longest contexts",
    "command": "python benchmarks/models.py",
}
BEGIN, END = "<!-- models: written by benchmarks/models.py -->", "<!-- end -->"


def workload_of(name: str, target: str, seq_len: int) -> Workload:
    """A preset of the table, on one ring of all devices."""
    return preset_workload(name.partition(",")[0], find_target(target), seq_len, **PRESETS[name])


def longest(name: str, target: str) -> int:
    """The longest context, a power of two, that fits by the closed forms; 0 if none of at least 32K does."""
    length = 2**14
    goal = replace(workload_of(name, target, length), batch_size=0)
    while any(not c.reason_against for c in candidates(replace(goal, seq_len=2 * length))):
        length *= 2
    return length if length > 2**14 else 0


def compiled(name: str) -> dict:
    """A step on v5e-256, of a million tokens or of the longest power of two below that fits."""
    length = 2 * LENGTH
    while True:
        length //= 2
        workload = workload_of(name, TPU, length).with_kernel()[0]
        workload, estimate = compile_first_accepted(
            workload, likely_settings(workload), lambda e: e.fits, lambda w: log(f"{name}, {w.seq_len:,}: {w.settings}")
        )
        if estimate.fits:
            break
    assert estimate.schedule, "what fits has a schedule"
    time = step_time(estimate.schedule, workload.step_tokens)
    return {
        "seq_len": length,
        "peak_bytes": estimate.peak_bytes,
        "step_seconds_model": time.step,
        "settings": str(workload.settings),
        **origin(name, workload.target),
    }


def counted(name: str, seq_len: int) -> dict:
    """The fastest way on 8xH100 by closed forms."""
    fitting = [c for c in candidates(replace(workload_of(name, GPU, seq_len), batch_size=0)) if not c.reason_against]
    best = fitting[0]
    return {"seq_len": seq_len, "step_seconds_model": best.time.step, "tokens": best.time.tokens, "way": str(best)}


def entry(name: str) -> dict:
    """All numbers of a preset."""
    lengths = {target: longest(name, target) for target in (TPU, GPU)}
    return {
        "date": datetime.date.today().isoformat(),
        "longest_closed_form": lengths,
        TPU: compiled(name),
        GPU: counted(name, min(lengths[GPU], LENGTH // 2)) if lengths[GPU] else None,
    }


def table(entries: dict[str, dict]) -> str:
    """The table of the page."""
    lines = [
        f"| model | longest on {TPU} | step on {TPU} | GiB a device | longest on {GPU} | step on {GPU} |",
        "|---" * 6 + "|",
    ]
    for name in PRESETS:
        if (e := entries.get(name)) is None:
            continue
        tpu, gpu, lengths = e[TPU], e[GPU], e["longest_closed_form"]
        of_gpu = "does not fit | -"
        if gpu:
            batch = gpu["tokens"] // gpu["seq_len"]
            of_gpu = f"{lengths[GPU] // 1024:,}K | {gpu['step_seconds_model']:.1f} s for {batch} x "
            of_gpu += f"{gpu['seq_len'] // 1024:,}K"
        lines.append(
            f"| {name} | {lengths[TPU] // 1024:,}K | {tpu['step_seconds_model']:.1f} s for {tpu['seq_len'] // 1024:,}K "
            f"| {tpu['peak_bytes'] / GiB:.1f} | {of_gpu} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PRESETS)
    parser.add_argument("--out", type=output_argument, default=Path("results/models.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"))
    asked = parser.parse_args()
    only_compilers()
    entries = json.loads(asked.out.read_text())["presets"] if asked.out.is_file() else {}
    for name in [asked.only] if asked.only else PRESETS:
        entries[name] = entry(name)
        asked.out.write_text(json.dumps(ORIGIN | {"presets": entries}, indent=1) + "\n")
        print(name, json.dumps(entries[name]), flush=True)
    write_table(asked.page, BEGIN, table(entries), END)
