"""`ringformer estimate --mode=train`."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringformer.data.packing.document_lengths import share_or_times
from ringformer.estimate.choices.memory_settings import compile_first_accepted, likely_settings
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.kernels.kernel_cycles import with_machine_code
from ringformer.estimate.reports.packed_documents import documents_json, documents_text
from ringformer.estimate.reports.report import closed_form_text, estimate_json, estimate_text, origin, title
from ringformer.estimate.reports.run_estimate import RunEstimate, compile_others, programs_json, programs_text
from ringformer.estimate.reports.time_report import device_hours, duration, step_seconds
from ringformer.estimate.workloads.command_tools import DOES_NOT_FIT, MODEL_FLAGS, given, log
from ringformer.estimate.workloads.targets import Target, find_target, with_group_network, with_host_memory
from ringformer.estimate.workloads.trained_state import with_state
from ringformer.estimate.workloads.training import Workload, preset_workload, stage_workloads
from ringformer.hardware import GiB
from ringformer.parallel.runtime_environment import runtime_environment
from ringformer.runs.config_file import load_config, parse_stages
from ringformer.train.checks import check_start, theta_warnings


def estimate_training(args: argparse.Namespace) -> int:
    """Estimate a training run, by compiling its programs or by closed forms, and print the report."""
    _check(args)
    target = with_host_memory(find_target(args.target), args.host_gib)
    target = with_group_network(target, args.group_gb_per_s)
    workloads, staged = _workloads(args, target)
    as_text = not args.json and (not staged or len(workloads) == 1)

    def show(text: str) -> None:
        if as_text:
            print(text, flush=True)

    reports = []
    for workload in workloads:
        workload, kernel = workload.with_kernel()
        if kernel:
            log(kernel)
        try:
            report = _estimate_run(workload, args, show)
        except CompilerFailure as failure:
            print(f"ringformer estimate: {workload.name}: {failure.meaning}{failure}", file=sys.stderr)
            return 1
        if staged:
            report["stage"] = workload.name
        report["environment"] = runtime_environment(target.chip.kind, report["host_bytes"])
        reports.append(report)
        if args.json:
            print(json.dumps(origin(args.config or args.model, target) | report), flush=True)
    if staged and not args.json:
        print(stages_table(reports))
        for report in reports:
            for reason in report.get("reasons_against", ()):
                print(f"{report['stage']}: DOES NOT FIT: {reason}")
    if not args.json:
        host_bytes = max(report["host_bytes"] for report in reports)
        settings = [f"{name}={value}" for name, value in runtime_environment(target.chip.kind, host_bytes).items()]
        if settings:
            print("environment:", *settings)
    fits = all(report["fits"] and report["fits_host"] for report in reports)
    if args.require_fit and not fits:
        return DOES_NOT_FIT
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for tokens out of range and for flags that exclude each other."""
    if args.tokens is not None and not 0 < args.tokens < math.inf:
        raise ValueError(f"--tokens={args.tokens:g} must be positive: the number of training tokens, e.g. 1e9")
    for flag, value in given(args, ("prefill_chunk", "cache_dtype")).items():
        raise ValueError(f"--{flag}={value} needs --mode=prefill or --mode=decode")
    if args.overrides and not args.config:
        raise ValueError(f"unexpected arguments: {' '.join(args.overrides)}; overrides need --config=FILE")
    if args.config and args.model:
        raise ValueError(f"--model={args.model} and --config={args.config} exclude each other: give one of them")
    args.model = args.model or "llama_7b"
    if args.closed_form and args.generate_code:
        raise ValueError("--closed_form and --generate_code exclude each other: give one of them")
    if not args.config and args.seq_len is None:
        raise ValueError("a preset needs a context: give --seq_len, e.g. --seq_len=1048576, or --config=FILE")


def _workloads(args: argparse.Namespace, target: Target) -> tuple[list[Workload], bool]:
    """Return the workloads with the flags applied, and True if they are the stages of a config."""
    stages = 0
    if args.config:
        values = load_config(args.config, args.overrides)
        stages = len(values.stages)
        configs = parse_stages(values, inherit=False)
        if values.init_from and not Path(values.init_from).exists():
            log(f"init_from={values.init_from} is not on this machine: the estimate is of the preset {values.preset}")
        for config in configs:
            check_start(config)
        for warning in theta_warnings(configs):
            log(warning)
        workloads = stage_workloads(configs, target)
    else:
        workloads = [preset_workload(args.model, target, args.seq_len)]
    if args.stage is not None:
        if args.stage > stages:
            raise ValueError(f"--stage={args.stage} does not exist: the config has {stages} stages")
        workloads = workloads[args.stage - 1 : args.stage]
    elif stages > 1 and args.tokens is not None:
        raise ValueError(
            f"--tokens={args.tokens:g} is ambiguous: each of the {stages} stages has its own tokens; select one with "
            "--stage, or change --config.stages"
        )
    settings = given(args, MODEL_FLAGS)
    for w in workloads:
        if settings and not w.has_closed_forms:
            first = f"--{next(iter(settings))}"
            raise ValueError(f"{first}: {type(w.model).__name__} is not a LLaMA; use its own --config.model.NAME=VALUE")
    shape = given(args, ("mesh_dim", "seq_len", "batch_size", "accumulate", "tokens"))
    workloads = [with_state(w, args) for w in workloads]
    return [replace(w, model=replace(w.model, **settings), **shape) for w in workloads], stages > 0


def _estimate_run(workload: Workload, args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Estimate a run and return its report as JSON. `show` is called with each part of the text report as soon as it is
    known."""
    workload, step = _compile(workload, args)
    head = title(args.config or args.model, workload)
    documents = documents_json(workload, step)
    if step is None:
        show(closed_form_text(head, workload, documents))
        return estimate_json(workload, None) | {"documents": documents}
    if workload.has_closed_forms:
        model = workload.model
        head = f"{head}, head_groups {model.head_groups}, remat_group {model.remat_group}"
        if model.full_remat_layers:
            head += f", full_remat_layers {model.full_remat_layers}"
    show(estimate_text(head, workload, step, documents))
    others = []
    if step.fits:
        log("compiling the other programs of a run: evaluation, init, ...")
        others = list(compile_others(workload, generate_code=args.generate_code))
    run = RunEstimate((step, *others))
    show(programs_text(run))
    return estimate_json(workload, step) | {"documents": documents} | programs_json(run)


def _compile(workload: Workload, args: argparse.Namespace) -> tuple[Workload, Estimate | None]:
    """Return the workload as it was compiled and its estimate; without a compiler, the first settings and None."""
    if not workload.has_closed_forms:  # no closed form could choose settings, or replace the compiler
        return workload, compile_apart(workload, generate_code=args.generate_code)
    chosen = args.config or args.head_groups or args.remat_group
    settings = [workload.settings] if chosen else likely_settings(workload)
    workload = workload.with_settings(settings[0])
    workload.check()
    not_compiled = workload.target.missing_compiler
    if args.closed_form:
        not_compiled = "closed form only, not compiled"
    if not_compiled:
        log(not_compiled)
        if reason := known_failure(workload):
            raise CompilerFailure(reason)
        return workload, None
    duration = "minutes" if args.generate_code else "half a minute"

    def announce(option: Workload) -> None:
        log(f"compiling for {option.target.topology} with {option.settings}; {duration}")

    workload, estimate = compile_first_accepted(workload, settings, lambda e: e.fits, announce, args.generate_code)
    if not args.quick:
        estimate = with_machine_code(workload, estimate, log)
    return workload, estimate


COLUMNS = {
    "stage": "<9",
    "context": ">10",
    "batch": ">6",
    "mesh": ">11",
    "peak GiB": ">15",
    "host GiB": ">9",
    "s/step": ">9",
    "tokens/s": ">12",
    "MFU": ">6",
    "duration": ">14",
    "device-hours": ">13",
    "passes": ">8",
}
"""Columns of the table of stages: alignment and width by title."""


def stages_table(stages: list[dict[str, Any]]) -> str:
    """Return a table of the stages' `estimate_json`, each with its name, and lines that explain it."""
    lines = [_row(list(COLUMNS))]
    sources: dict[str, list[str]] = {}
    for stage in stages:
        time = stage["documents"] or stage
        cells = [
            stage["stage"],
            f"{stage['seq_len']:,}",
            str(stage["batch_size"]),
            stage["mesh_dim"],
            f"{stage['peak_bytes'] / GiB:.1f} of {stage['hbm_bytes'] / GiB:.1f}",
            f"{stage['host_bytes'] / GiB:.1f}",
            _formatted(time["step_seconds_model"], step_seconds),
            _formatted(time["tokens_per_second_model"], "{:,.0f}".format),
            _formatted(stage["mfu_causal_model"], "{:.0%}".format),
            _formatted(time.get("days_model"), lambda days: duration(86400 * days)),
            _formatted(time.get("device_hours_model"), device_hours),
            _formatted(stage.get("passes"), share_or_times),
        ]
        lines.append(f"{_row(cells)}  {_verdict(stage)}")
        sources.setdefault(f"{_how(stage)}: {stage['seconds_source']}", []).append(stage["stage"])
    for stage in stages:
        if stage["documents"]:
            lines.append(f"{stage['stage']}: {documents_text(stage['documents'])}")
    for source, names in sources.items():
        lines.append(f"{', '.join(names)}: {source}")
    for stage in stages:
        for line in stage.get("advice", ()):
            lines.append(f"{stage['stage']}: try: {line}")
    lines += [
        "s/step: one optimizer step, from the batch on the devices to the updated state; duration and device-hours: "
        "all tokens of the stage",
        "MFU: model FLOPs of one document a sequence, attention halved for its causal mask; passes: through the store, "
        "once it is built",
    ]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "".join(f"{cell:{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))


def _verdict(stage: dict[str, Any]) -> str:
    if not stage["fits"]:
        return "DOES NOT FIT"
    if not stage["fits_host"]:
        return "HOST MEMORY DOES NOT FIT"
    if stage["closed_form"] or stage["untried_kernels"]:
        return "should fit"
    return "fits"


def _how(stage: dict[str, Any]) -> str:
    """Describe what the numbers of a stage are based on."""
    if stage["closed_form"]:
        return "not compiled"
    if stage["untried_kernels"]:
        return "compiled, its kernels not"
    return "compiled, time modelled"


def _formatted(x: float | None, form: Callable[[float], str]) -> str:
    return "-" if x is None else form(x)
