"""What inference of a 7B at 1M tokens takes, and the longest contexts that targets hold, by their compilers.

    python benchmarks/inference_contexts.py [--only=NAME] [--out=results/inference.json] [--page=docs/estimating.md]

Compiled, not measured: bytes are the compilers', seconds modelled from bytes and FLOPs (`ringformer estimate --quick`).
Half a minute to two an entry; what an entry said replaces what it said before, and the tables in the page follow.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.inference.report import inference_json
from ringformer.estimate.inference.search import Accepted, completed, likely, longest, whole
from ringformer.estimate.reports.report import origin
from ringformer.estimate.workloads.command_tools import log
from ringformer.estimate.workloads.inference import DECODE, FIRST_CHUNK, PREFILL, InferenceWorkload
from ringformer.estimate.workloads.targets import find_target, only_compilers
from ringformer.hardware import GiB
from ringformer.hardware.shares import SHARES
from ringformer.inference.cache.arrays import CacheDtype
from ringformer.models.families.llama import LlamaConfig, preset

MILLION = 2**20
AT_A_MILLION = {
    f"llama_7b/{target}/{dtype}" + f"/{cache}" * (cache == "int8"): ("llama_7b", target, dtype, cache)
    for target, dtype, cache in (
        ("v5e-256", "bfloat16", "compute"),
        ("v5e-256", "bfloat16", "int8"),
        ("v5p-128", "bfloat16", "compute"),
        ("v4-256", "bfloat16", "compute"),
        ("v4-256", "float32", "compute"),
        ("8xH100", "bfloat16", "compute"),
        ("8xH100", "bfloat16", "int8"),
        ("8xA100-80", "bfloat16", "compute"),
    )
}
LONGEST = {
    f"{model}/{target}" + f"/{cache}" * (cache == "int8"): (model, target, "bfloat16", cache)
    for model, target, cache in (
        *product(("llama_7b", "llama_13b", "llama3_8b"), ("v5e-32", "8xH100", "v4-1024"), ("compute",)),
        ("llama_7b", "8xH100", "int8"),
    )
}
SAID = {
    PREFILL: (
        "prefill_seconds_model",
        "prefill_exposed_seconds",
        "tokens_per_second_model",
        "first_chunk_seconds_model",
        "last_chunk_seconds_model",
        "mfu_causal_model",
    ),
    DECODE: ("decode_seconds_model", "floor_seconds", "exposed_seconds"),
}
OF_BOTH = (
    "fits",
    "peak_bytes",
    "headroom_bytes",
    "argument_bytes",
    "temp_bytes",
    "seconds_source",
    "host_waits",
    "collectives_executed",
    "exposed_permute_bytes",
    "exposed_gather_bytes",
)
MARKS = {kind: f"<!-- {kind}: results/inference.json -->" for kind in ("at_a_million", "longest")}
END = "<!-- end of inference -->"


def entry(found: Accepted, reasons: list[str] | None = None) -> dict:
    """What is kept of a context's prefill and decode step."""
    found = completed(found, (FIRST_CHUNK,), log) if found.workload.chunks > 1 else found
    (w, estimates), target = found, found.workload.target
    shape = f"--mesh_dim={w.mesh_dim} --seq_len={w.seq_len} --prefill_chunk={w.chunk}"
    flags = f"--model={w.name} --target={target.name} {shape} --kernel=auto --compute_dtype={w.model.compute_dtype}"
    flags += f" --cache_dtype={w.cache_dtype}"
    said = origin(w.name, target) | {"devices": target.num_devices, "hbm_bytes": target.chip.hbm_bytes}
    programs = {name: inference_json(w, name, estimates) for name in (PREFILL, DECODE) if name in estimates}
    fields = (
        "mesh_dim",
        "seq_len",
        "batch_size",
        "kernel",
        "compute_dtype",
        "weight_bytes",
        "cache_bytes",
        "loading_peak_bytes",
    )
    said |= {field: programs[PREFILL][field] for field in (*fields, "prefill_chunk", "chunks")}
    said["cache_dtype"] = w.cache_dtype
    for name, all_ in programs.items():
        said[name] = {field: all_[field] for field in (*SAID[name], *OF_BOTH)}
        said[name]["command"] = f"ringformer estimate --mode={name.split()[0]} {flags} --quick"
    said["fits"] = found.fits and DECODE in programs
    if reasons is not None:
        said["why_not_longer"] = reasons
    return said | made()


def at_a_million(model: str, target: str, dtype: str, cache: CacheDtype) -> dict:
    workload = _workload(model, target, dtype, cache, MILLION)
    return entry(whole(likely(workload, mesh=True, chunk=True), log))


def longest_context(model: str, target: str, dtype: str, cache: CacheDtype) -> dict:
    found, reasons = longest(_workload(model, target, dtype, cache, MILLION), mesh=True, chunk=True, log=log)
    if found is None:
        raise SystemExit(f"{model} on {target}: {reasons}")
    return entry(found, reasons)


def _workload(model: str, target: str, dtype: str, cache: CacheDtype, seq_len: int) -> InferenceWorkload:
    config = replace(LlamaConfig(**preset(model)), kernel="auto", compute_dtype=dtype)
    return InferenceWorkload(config, find_target(target), "1,1,1,-1", seq_len, name=model, cache_dtype=cache)


def tables(results: dict) -> dict[str, str]:
    """The page's tables by the mark before each."""
    head = (
        "| model | target | context | mesh | chunk | weights + cache, GiB per device | peak of prefill, decode, GiB "
        "| prefill, MFU (causal) | decode, floor | shares of the peaks |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    return {kind: "\n".join([head, *map(_row, results[kind].values())]) for kind in MARKS}


def _row(e: dict) -> str:
    prefill, decode = e[PREFILL], e[DECODE]
    model = e["model"] + (", float32" if e["compute_dtype"] == "float32" else "")
    model += ", int8 cache" if e["cache_dtype"] == "int8" else ""
    chunk = "whole" if e["chunks"] == 1 else f"{e['prefill_chunk']:,}"
    held = f"{e['weight_bytes'] / GiB:.2f} + {e['cache_bytes'] / GiB:.2f}"
    peaks = f"{prefill['peak_bytes'] / GiB:.2f}, {decode['peak_bytes'] / GiB:.2f} of {e['hbm_bytes'] / GiB:.2f}"
    shares = SHARES[find_target(e["target"]).generation].kind
    times = (
        f"{prefill['prefill_seconds_model']:,.0f}\N{NO-BREAK SPACE}s, {prefill['mfu_causal_model']:.0%} | "
        f"{decode['decode_seconds_model'] * 1e3:.1f}, {decode['floor_seconds'] * 1e3:.1f}\N{NO-BREAK SPACE}ms"
    )
    sizes = f"{e['seq_len']:,} | {e['mesh_dim']} | {chunk} | {held} | {peaks}"
    return f"| {model} | {e['target']} | {sizes} | {times} | {shares} |"


def write_tables(page: Path, results: dict) -> None:
    """Replace the tables between their marks."""
    for kind, table in tables(results).items():
        write_table(page, MARKS[kind], table, END)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*AT_A_MILLION, *LONGEST])
    parser.add_argument("--out", type=output_argument, default="results/inference.json")
    parser.add_argument("--page", type=Path, default=Path("docs/estimating.md"))
    args = parser.parse_args()
    only_compilers()
    for kind, entries, find in (("at_a_million", AT_A_MILLION, at_a_million), ("longest", LONGEST, longest_context)):
        for name, case in entries.items():
            if args.only not in (None, name):
                continue
            said = find(*case)
            known = json.loads(args.out.read_text()) if args.out.exists() else {}
            about = "compiled to the schedule; seconds modelled from HBM bytes and FLOPs at stated shares of the peak"
            content = {
                "what": about,
                "command": "python benchmarks/inference_contexts.py",
                "at_a_million": {},
                "longest": {},
            } | known
            content[kind][name] = said
            write_results(args.out, content)
            print(f"{name}: {said['seq_len']:,} tokens, fits: {said['fits']}", flush=True)
    if args.page.exists():
        write_tables(args.page, json.loads(args.out.read_text()))


if __name__ == "__main__":
    main()
