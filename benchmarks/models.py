"""Estimate a train step of each family on v5e-256 and 8xH100, and the longest contexts.

    python benchmarks/models.py [--only=PRESET | --compile_times | --schedule_times] [--out=results/models.json]
        [--page=docs/models.md]

v5e-256: compiled for one sequence of 1M tokens, or the longest power of two that the compiler accepts; seconds are
modelled from the schedule. 8xH100: closed forms, not compiled. Longest contexts: closed forms, powers of two. Half a
minute to three a preset; what a preset said replaces what it said before, and the tables in the page follow.

--compile_times: CPU seconds to lower and compile a small train step for eight simulated devices, over those of a LLaMA
with as many layers; alternated, the median of three.
--schedule_times: CPU seconds of libtpu to the schedule of the step of 1M tokens on v5e-256, for Gemma 3 12B, for its
two kinds of layers alone, and for LLaMA-3 8B; the median of three.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.data import Batch
from ringformer.estimate.choices.candidates import candidates
from ringformer.estimate.choices.memory_settings import compile_first_accepted, likely_settings
from ringformer.estimate.closed_forms.training import step_time
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.reports.report import origin
from ringformer.estimate.workloads.command_tools import log
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.estimate.workloads.training import Workload, preset_workload
from ringformer.hardware import GiB
from ringformer.models.registry import preset_config
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.runs.config import OptimizerConfig
from ringformer.train.program import make_program

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
    "what": "compiled to the schedule on TPU, seconds modelled from it; closed forms on GPU, and for longest contexts; "
    "times to compile on a CPU",
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
        **made(),
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


SEVERAL_KINDS = "gemma3_1b", "olmo3_7b", "smollm3_3b"
SMALL = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
COMPILE_BEGIN = "<!-- compile times: written by benchmarks/models.py --compile_times -->"


def compile_seconds(name: str, **changes: Any) -> float:
    """CPU seconds to lower and compile a train step of a preset made small, for eight simulated devices."""
    model = preset_config(name, **SMALL | {"head_dim": 16} | changes)
    mesh = make_mesh("1,1,1,8")
    program = make_program(model, mesh, OptimizerConfig(), steps=10, seq_len=4096, accumulate=1)

    sharding = NamedSharding(mesh, BATCH)
    ids, mask = (jax.ShapeDtypeStruct((1, 4096), dtype, sharding=sharding) for dtype in (jnp.int32, jnp.bool_))
    begin = time.process_time()
    program.step.lower(program.state, Batch(ids, ids, ids, ids, mask, mask)).compile()
    return time.process_time() - begin


def compile_times() -> dict[str, float]:
    """Compile time of each model with layers of several kinds over that of a LLaMA with as many layers."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    compile_seconds("tiny")  # imports and caches
    ratios = {}
    for name in SEVERAL_KINDS:
        config = preset_config(name)
        window = {"window": 64} if config.window else {}
        pairs = [
            (compile_seconds(name, **window), compile_seconds("tiny", num_layers=config.num_layers)) for _ in range(3)
        ]
        ratios[name] = float(np.median([own / llama for own, llama in pairs]))
    return ratios


def compile_table(ratios: dict[str, float]) -> str:
    """The table of compile times."""
    return "\n".join(
        [
            "| model | time to compile a train step, over a LLaMA with as many layers |",
            "|---|---|",
            *(f"| {name} | {ratio:.1f} |" for name, ratio in ratios.items()),
        ]
    )


SCHEDULED: dict[str, dict] = {
    "llama3_8b": {},
    "gemma3_12b": {},
    "gemma3_12b, windows alone": {"layer_types": "W"},
    "gemma3_12b, full attention": {"layer_types": "F", "window": 0},
}
"""Models whose steps are scheduled against the clock."""
SCHEDULE_BEGIN = "<!-- schedule times: written by benchmarks/models.py --schedule_times -->"


def schedule_times() -> dict[str, float]:
    """CPU seconds of libtpu to the schedule of each model's step, in a process of its own; the median of three."""
    only_compilers()
    taken: dict[str, list[float]] = {name: [] for name in SCHEDULED}
    for _ in range(3):
        for name, changes in SCHEDULED.items():
            preset = name.split(",")[0]
            settings = changes | {"compute_dtype": "bfloat16", "remat": "full"}
            workload = preset_workload(preset, find_target(TPU), LENGTH, **settings).with_kernel()[0]
            before = _seconds_of_children()
            compile_apart(workload)
            taken[name].append(_seconds_of_children() - before)
            log(f"{name}: {taken[name][-1]:.1f} CPU seconds")
    return {name: float(np.median(seconds)) for name, seconds in taken.items()}


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def schedule_table(seconds: dict[str, float]) -> str:
    """The table of the times to the schedule."""
    lines = ["| step | CPU seconds to its schedule |", "|---|---|"]
    lines += [f"| {name} | {taken:.1f} |" for name, taken in seconds.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PRESETS)
    parser.add_argument("--compile_times", action="store_true")
    parser.add_argument("--schedule_times", action="store_true")
    parser.add_argument("--out", type=output_argument, default=Path("results/models.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"))
    asked = parser.parse_args()
    saved: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.is_file() else ORIGIN | {"presets": {}}
    if asked.compile_times:
        measured = {**made(), "jax": jax.__version__}
        saved |= ORIGIN | {"compile_times": measured | {"ratios": compile_times()}}
        write_results(asked.out, saved)
        write_table(asked.page, COMPILE_BEGIN, compile_table(saved["compile_times"]["ratios"]), END)
        raise SystemExit
    if asked.schedule_times:
        saved["schedule_times"] = {**made(), "versions": compiled_by(find_target(TPU)), "seconds": schedule_times()}
        write_results(asked.out, saved)
        write_table(asked.page, SCHEDULE_BEGIN, schedule_table(saved["schedule_times"]["seconds"]), END)
        raise SystemExit
    only_compilers()
    for name in [asked.only] if asked.only else PRESETS:
        saved["presets"][name] = entry(name)
        write_results(asked.out, saved)
        print(name, json.dumps(saved["presets"][name]), flush=True)
    write_table(asked.page, BEGIN, table(saved["presets"]), END)
