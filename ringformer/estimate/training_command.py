"""`ringformer estimate --mode=train`."""

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import Any

from ringformer.estimate.command_tools import DOES_NOT_FIT, MODEL_FLAGS, log
from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.programs_report import programs_json, programs_text, save_closed_form
from ringformer.estimate.report import (
    closed_form_json,
    closed_form_text,
    estimate_json,
    estimate_text,
    origin,
    stage_json,
    stages_table,
)
from ringformer.estimate.run_estimate import RunEstimate, compile_others
from ringformer.estimate.search.memory_settings import compile_first_accepted, likely_settings
from ringformer.estimate.seconds.kernel_cycles import with_machine_code
from ringformer.estimate.targets import Target, find_target, only_compilers
from ringformer.estimate.workload import Workload, stage_workloads
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.parallel.runtime_environment import runtime_environment
from ringformer.runs.config_file import load_config, parse_stages


def estimate_training(args: argparse.Namespace) -> int:
    """Compile the programs of a training run, or count them in closed form, and print the report."""
    _check_numbers(args)
    only_compilers()
    target = find_target(args.target)
    workloads, staged = _workloads(args, target)
    origins, reports = origin(args.config or args.model, target), []
    for workload in workloads:
        printed = not args.json and (not staged or len(workloads) == 1)
        workload, kernel = workload.with_kernel()
        if kernel:
            log(kernel)
        try:
            workload, estimate = _compile(workload, args)
            report, text = _report(workload, estimate, args, staged)
            if printed:
                print(text, flush=True)
            if estimate:
                run = _compile_others(workload, estimate, args)
                report |= programs_json(run)
                if printed:
                    print(programs_text(run))
        except CompilerFailure as failure:
            print(f"ringformer estimate: {workload.name}: {failure.meaning}{failure}", file=sys.stderr)
            return 1
        report["environment"] = runtime_environment(target.chip.kind, report["host_bytes"])
        reports.append(report)
        if args.json:
            shape = {"mesh_dim": workload.mesh_dim, "seq_len": workload.seq_len, "batch_size": workload.batch_size}
            print(json.dumps(origins | shape | report), flush=True)
    if staged and not args.json:
        print(stages_table(reports))
        for report in reports:
            for reason in report.get("reasons_against", ()):
                print(f"{report['stage']}: DOES NOT FIT: {reason}")
    if not args.json and (needed := runtime_environment(target.chip.kind, max(r["host_bytes"] for r in reports))):
        print("environment:", *(f"{name}={value}" for name, value in needed.items()))
    fits = all(report["fits"] and report["fits_host"] for report in reports)
    return DOES_NOT_FIT if args.require_fit and not fits else 0


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise ValueError for numbers out of range and for flags that exclude each other."""
    for name in ("stage", "seq_len", "batch_size", "accumulate", "remat_group", "head_groups", "q_chunk", "k_chunk"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
    if args.tokens is not None and not 0 < args.tokens < math.inf:
        raise ValueError(f"--tokens={args.tokens:g} must be positive: the number of training tokens, e.g. 1e9")
    if args.prefill_chunk is not None:
        raise ValueError(f"--prefill_chunk={args.prefill_chunk} needs --mode=prefill or --mode=decode")
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
    """Return the workloads with the flags applied, and whether they are the stages of a config."""

    stages = 0
    if args.config:
        values = load_config(args.config, args.overrides)
        stages = len(values.stages)
        workloads = stage_workloads(parse_stages(values, inherit=False), target)
    else:
        model = LlamaConfig(**preset(args.model))
        workloads = [Workload(model, target, "1,1,1,-1", args.seq_len, name=args.model)]
    if args.stage is not None:
        if args.stage > stages:
            raise ValueError(f"--stage={args.stage} does not exist: the config has {stages} stages")
        workloads = workloads[args.stage - 1 : args.stage]
    elif stages > 1 and args.tokens is not None:
        raise ValueError(
            f"--tokens={args.tokens:g} is ambiguous: each of the {stages} stages has its own tokens; select one with "
            "--stage, or change --config.stages"
        )
    names = ("mesh_dim", "seq_len", "batch_size", "accumulate", "tokens")
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    settings = {name: value for name in MODEL_FLAGS if (value := getattr(args, name)) is not None}
    for w in workloads:
        if settings and not w.has_closed_forms:
            given = f"--{next(iter(settings))}"
            raise ValueError(f"{given}: {type(w.model).__name__} is not a LLaMA; use its own --config.model.NAME=VALUE")
    return [replace(w, model=replace(w.model, **settings), **fields) for w in workloads], stages > 0


def _compile(workload: Workload, args: argparse.Namespace) -> tuple[Workload, Estimate | None]:
    """Return the workload as it was compiled and its estimate; without a compiler, the first settings and None."""

    if not workload.has_closed_forms:  # no closed form to choose settings with, or to answer without the compiler
        return workload, compile_apart(workload, generate_code=args.generate_code)
    choose = not (args.config or args.head_groups or args.remat_group)
    settings = likely_settings(workload) if choose else [workload.settings]
    duration = "minutes" if args.generate_code else "half a minute"

    def announce(w: Workload) -> None:
        log(f"compiling for {w.target.topology} with {w.settings}; {duration}")

    if not_compiled := "closed form only, not compiled" if args.closed_form else workload.target.missing_compiler:
        log(not_compiled)
        workload = workload.with_settings(settings[0])
        workload.check()
        if reason := known_failure(workload):
            raise CompilerFailure(reason)
        return workload, None
    workload, estimate = compile_first_accepted(workload, settings, lambda e: e.fits, announce, args.generate_code)
    return workload, estimate if args.quick else with_machine_code(workload, estimate, log)


def _compile_others(workload: Workload, step: Estimate, args: argparse.Namespace) -> RunEstimate:
    """Return the estimate of the whole run, or of the train step alone if that does not fit."""

    if not step.fits:
        return RunEstimate((step,))
    log("compiling the other programs of a run: evaluation, init, ...")
    return RunEstimate((step, *compile_others(workload, generate_code=args.generate_code)))


def _report(workload: Workload, estimate: Estimate | None, args: argparse.Namespace, staged: bool) -> tuple[dict, str]:
    """Report on a workload as JSON and as text."""

    title = (
        f"{args.config or args.model}, {workload.batch_size} x {workload.seq_len:,} tokens, "
        f"mesh {workload.mesh_dim}, {args.target}"
    )
    if estimate is None:
        report = stage_json(workload, None) if staged else closed_form_json(workload)
        return report, f"{closed_form_text(title, workload)}\n{save_closed_form(workload)}"
    if workload.has_closed_forms:
        title += f", head_groups {workload.model.head_groups}, remat_group {workload.model.remat_group}"
    report = stage_json(workload, estimate) if staged else estimate_json(workload, estimate)
    return report, estimate_text(title, workload, estimate)
