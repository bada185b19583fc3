"""`ringformer plan`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from ringformer.estimate.workloads.command_tools import DOES_NOT_FIT, log


@dataclass(frozen=True)
class PlanOptions:
    """The flags of a plan, except the model's compute_dtype."""

    model: str
    """a preset (ringformer/models/families/), or the folder of a run or of a converted model"""
    target: str
    """v5e-256, 32xA100-80, ..."""
    seq_len: int | None = None
    """tokens of a sequence; default: as many as fit"""
    host_gib: float | None = None
    """host memory for each device, in GiB; default: that of a usual host"""
    group_gb_per_s: float | None = None
    """for groups of GPUs (2x32xH100): GB/s of one GPU between groups, e.g. 1.6"""
    batch_size: int | None = None
    """sequences of a step; default: as many as are fastest per token, up to 8"""
    max_step_seconds: float | None = None
    """without --seq_len: also plan the longest context whose modelled step takes at most this; default: 3600"""
    store: str | None = None
    """with --seq_len: a token store; also find the layout, chunks and buckets that are fastest for its documents"""
    generate_code: bool = True
    """stop at the schedule of the winner's programs (a minute); default: compile to machine code (minutes)"""


def add_plan(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer plan`."""
    from ringformer.cli.dataclass_flags import add_flags
    from ringformer.estimate.workloads.state_flags import StateFlags
    from ringformer.models.decoder_config import DecoderConfig

    parser.description = (
        "Find the fastest mesh, parallelism of attention and memory settings that the compiler accepts for a context. "
        "Without --seq_len, find "
        "the longest context that fits, and the longest whose step takes at most --max_step_seconds. Candidates "
        "are compared by the seconds that `estimate` models from bytes, FLOPs and exposed communication; the winner's "
        "seconds are based on machine code."
    )
    add_flags(parser, PlanOptions)
    add_flags(parser, StateFlags)
    add_flags(parser, DecoderConfig, ["compute_dtype"])
    return _plan


def _plan(args: argparse.Namespace) -> int:
    from ringformer.data.stores.folder import open_one
    from ringformer.estimate.compiled.dump import CompilerFailure
    from ringformer.estimate.reports.run_estimate import RunCompiler
    from ringformer.estimate.search.longest_context import MAX_STEP_SECONDS
    from ringformer.estimate.search.plan import longest_plan, longest_plan_within, plan
    from ringformer.estimate.search.plan_report import how_it_fits, packing_text, plan_text
    from ringformer.estimate.workloads.targets import find_target, only_compilers, with_group_network, with_host_memory
    from ringformer.estimate.workloads.trained_state import with_state
    from ringformer.estimate.workloads.training import preset_workload
    from ringformer.settings import LARGEST

    limit = MAX_STEP_SECONDS if args.max_step_seconds is None else args.max_step_seconds
    if not limit > 0:
        raise ValueError(f"--max_step_seconds={limit:g} must be positive: the longest step in seconds, e.g. 3600")
    if args.seq_len is not None and args.max_step_seconds is not None:
        raise ValueError(
            f"--max_step_seconds={limit:g} searches for a context, and --seq_len={args.seq_len} sets one: leave one of "
            "them out"
        )
    if args.store is not None and args.seq_len is None:
        raise ValueError(f"--store={args.store} needs --seq_len: its documents are packed into sequences of one length")
    for name in ("seq_len", "batch_size"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= LARGEST:
            raise ValueError(f"--{name}={value} must be at least 1, and at most {LARGEST:,}; or leave it out")
    if args.store is not None:
        open_one(args.store, ("train",))  # checked first: a plan takes minutes
    only_compilers()
    target = with_host_memory(find_target(args.target), args.host_gib)
    target = with_group_network(target, args.group_gb_per_s)
    goal = preset_workload(args.model, target, args.seq_len or 0, compute_dtype=args.compute_dtype)
    goal = with_state(replace(goal, batch_size=args.batch_size or 0), args)
    compiler = RunCompiler(log, generate_code=args.generate_code)
    try:
        if args.seq_len is not None:
            planned = plan(goal, compiler)
            print(plan_text(planned))
            if planned.chosen is None:
                return DOES_NOT_FIT
            if args.store is not None:
                print(packing_text(planned, args.store))
            return 0
        planned = longest_plan(goal, compiler)
        print(f"the longest context that {how_it_fits(planned)}: {plan_text(planned)}", flush=True)
        if planned.chosen is None:
            return DOES_NOT_FIT
        quick = longest_plan_within(planned, compiler, limit)
        text = "the same" if quick is planned else plan_text(quick)
        print(f"the longest with a step of at most {limit:,.4g} s: {text}")
        return 0
    except CompilerFailure as failure:
        print(f"ringformer plan: {failure.meaning}{failure}", file=sys.stderr)
        return 1
