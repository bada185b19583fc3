"""`ringformer plan`."""

import argparse
import sys
from collections.abc import Callable

from ringformer.estimate.command_tools import DOES_NOT_FIT, log


def add_plan(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Arguments of `ringformer plan`."""
    parser.description = (
        "The fastest mesh and memory settings that the compiler accepts for a context, or for the longest: that which "
        "fits, and that whose step takes at most --max_step_seconds. Fastest by the seconds that `estimate` says of "
        "bytes, FLOPs and exposed communication; those of the winner by machine code."
    )
    parser.add_argument("--model", required=True, help="a preset (ringformer/models/llama_presets.py)")
    parser.add_argument("--target", required=True, help="v5e-256, 32xA100-80, ...")
    parser.add_argument("--seq_len", type=int, help="tokens of a sequence; without: as long as possible")
    parser.add_argument(
        "--max_step_seconds",
        type=float,
        help="of the longest context: plan also the longest whose step takes no more, modelled; 3600 if not given",
    )
    from ringformer.cli.dataclass_flags import add_flags
    from ringformer.models.llama_config import LlamaConfig

    add_flags(parser, LlamaConfig, ["compute_dtype"])
    parser.add_argument(
        "--no_generate_code",
        action="store_true",
        help="end with the schedule of the winner's programs, a minute; without, with their machine code, minutes",
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
        raise ValueError(f"--max_step_seconds={limit:g} must be positive: how long one step may take, e.g. 3600")
    if args.seq_len is not None and args.max_step_seconds is not None:
        raise ValueError(
            f"--max_step_seconds={limit:g} is for the longest context, and --seq_len={args.seq_len} says "
            "which: leave one of them out"
        )
    only_compilers()
    target = find_target(args.target)
    compiler = RunCompiler(log, generate_code=not args.no_generate_code)
    try:
        if args.seq_len is None:
            planned = longest_plan(args.model, target, args.compute_dtype, compiler)
            print(f"the longest that {how_it_fits(planned)}: {plan_text(args.model, target, planned)}", flush=True)
            if planned.chosen is None:
                return DOES_NOT_FIT
            quick = longest_plan_within(planned, args.model, target, args.compute_dtype, compiler, limit)
            of = f"the longest of which a step takes at most {limit:,.4g} s"
            print(f"{of}: the same" if quick is planned else f"{of}: {plan_text(args.model, target, quick)}")
            return 0
        planned = plan(args.model, target, args.seq_len, args.compute_dtype, compiler)
    except CompilerFailure as failure:
        said = f"the compiler broke down, which says nothing of what fits: {failure}"
        print(f"ringformer plan: {said}", file=sys.stderr)
        return 1
    print(plan_text(args.model, target, planned))
    return 0 if planned.chosen else DOES_NOT_FIT
