"""`ringformer plan`."""

import argparse
import sys
from collections.abc import Callable

from ringformer.estimate.command_tools import DOES_NOT_FIT, log


def add_plan(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Arguments of `ringformer plan`."""
    parser.description = (
        "Find the fastest mesh and memory settings that the compiler accepts for a context. Without --seq_len, find "
        "the longest context that fits, and the longest whose step takes at most --max_step_seconds. Candidates "
        "are compared by the seconds that `estimate` models from bytes, FLOPs and exposed communication; the winner's "
        "seconds are based on machine code."
    )
    parser.add_argument("--model", required=True, help="a preset (ringformer/models/llama_presets.py)")
    parser.add_argument("--target", required=True, help="v5e-256, 32xA100-80, ...")
    parser.add_argument("--seq_len", type=int, help="tokens of a sequence; default: as many as fit")
    parser.add_argument(
        "--max_step_seconds",
        type=float,
        help="without --seq_len: also plan the longest context whose modelled step takes at most this; default: 3600",
    )
    from ringformer.cli.dataclass_flags import add_flags
    from ringformer.models.llama_config import LlamaConfig

    add_flags(parser, LlamaConfig, ["compute_dtype"])
    parser.add_argument(
        "--no_generate_code",
        action="store_true",
        help="stop at the schedule of the winner's programs (a minute); default: compile to machine code (minutes)",
    )
    return _plan


def _plan(args: argparse.Namespace) -> int:
    from ringformer.estimate.compiler.dump import CompilerFailure
    from ringformer.estimate.run_estimate import RunCompiler
    from ringformer.estimate.search.longest_context import MAX_STEP_SECONDS
    from ringformer.estimate.search.longest_plan import longest_plan, longest_plan_within
    from ringformer.estimate.search.plan import plan
    from ringformer.estimate.search.plan_report import how_it_fits, plan_text
    from ringformer.estimate.targets import find_target, only_compilers

    limit = MAX_STEP_SECONDS if args.max_step_seconds is None else args.max_step_seconds
    if not limit > 0:
        raise ValueError(f"--max_step_seconds={limit:g} must be positive: the longest step in seconds, e.g. 3600")
    if args.seq_len is not None and args.max_step_seconds is not None:
        raise ValueError(
            "which: leave one of them out"
            f"--max_step_seconds={limit:g} searches for a context, and --seq_len={args.seq_len} sets one: leave one of "
            "them out"
            "which: leave one of them out"
        )
    only_compilers()
    target = find_target(args.target)
    compiler = RunCompiler(log, generate_code=not args.no_generate_code)
    try:
        if args.seq_len is None:
            planned = longest_plan(args.model, target, args.compute_dtype, compiler)
            print(
                f"the longest context that {how_it_fits(planned)}: {plan_text(args.model, target, planned)}", flush=True
            )
            if planned.chosen is None:
                return DOES_NOT_FIT
            quick = longest_plan_within(planned, args.model, target, args.compute_dtype, compiler, limit)
            text = "the same" if quick is planned else plan_text(args.model, target, quick)
            print(f"the longest with a step of at most {limit:,.4g} s: {text}")
            return 0
        planned = plan(args.model, target, args.seq_len, args.compute_dtype, compiler)
    except CompilerFailure as failure:
        print(f"ringformer plan: {failure.meaning}{failure}", file=sys.stderr)
        return 1
    print(plan_text(args.model, target, planned))
    return 0 if planned.chosen else DOES_NOT_FIT
