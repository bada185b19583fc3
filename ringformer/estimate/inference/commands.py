"""`ringformer estimate --mode=prefill|decode`."""

import argparse
import json
import sys

from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.program_estimate import fitting
from ringformer.estimate.inference.report import inference_json, inference_text
from ringformer.estimate.inference.search import Accepted, completed, first_accepted, likely, longest
from ringformer.estimate.kernels.kernel_cycles import with_machine_code
from ringformer.estimate.reports.report import origin, title
from ringformer.estimate.workloads.command_tools import DOES_NOT_FIT, MODEL_FLAGS, given, log
from ringformer.estimate.workloads.inference import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import STATE_KEYS, named_model

PROGRAM = {"prefill": PREFILL, "decode": DECODE}
OF_TRAINING = (
    "config",
    "stage",
    "accumulate",
    "tokens",
    "attention",
    "remat",
    "remat_group",
    "full_remat_layers",
    "head_groups",
    "offload",
    "optimizer_offload",
    *STATE_KEYS,
    "host_gib",
    "group_gb_per_s",
    "fetch_ahead",
    "generate_code",
    "closed_form",
)
"""Flags that apply only to a train step, or that inference does not support."""


def estimate_inference(args: argparse.Namespace) -> int:
    """Compile prefill or decoding (`args.mode`) for a context, or for the longest that fits, and print the report.
    Raises ValueError for flags of training, and for settings that are invalid for every session."""
    for flag, value in given(args, OF_TRAINING).items():
        if value is not False:
            raise ValueError(f"--{flag} does not apply to --mode={args.mode}: leave it out, or use --mode=train")
    if args.overrides:
        raise ValueError(f"unexpected arguments: {' '.join(args.overrides)}")
    target = find_target(args.target)
    if target.slices > 1:
        one = args.target.partition("x")[2]
        raise ValueError(
            f"--mode={args.mode} does not apply to {args.target}: its {target.slices_are} share nothing, "
            f"so estimate one of them, with its rows: --target={one}"
        )
    name = args.model or "llama_7b"
    program = PROGRAM[args.mode]
    target.require_compiler()
    model = named_model(name, **given(args, MODEL_FLAGS))
    shape = args.mesh_dim or "1,1,1,-1", args.seq_len or 0, args.batch_size or 1
    cache = {"prefill_chunk": args.prefill_chunk} | given(args, ("cache_dtype",))
    workload = InferenceWorkload(model, target, *shape, name=name, **cache)
    reasons: list[str] = []
    open_ = {"mesh": args.mesh_dim is None, "chunk": args.prefill_chunk is None}
    try:
        accepted: Accepted | None
        if args.seq_len is None:
            accepted, reasons = longest(workload, **open_, log=log)
            if accepted is None:
                print("no context fits:")
                for reason in reasons:
                    print(f"  {reason}")
                return DOES_NOT_FIT
        else:
            options = likely(workload, **open_)
            if program != PREFILL:
                options = options[:1]
            accepted = first_accepted(options, program, log)
        workload, estimates = accepted = _with_seconds(accepted, program, args.quick)
    except CompilerFailure as failure:
        print(f"ringformer estimate: {name}: {failure.meaning}{failure}", file=sys.stderr)
        return 1
    if args.json:
        longer = {} if args.seq_len else {"why_not_longer": reasons}
        report = inference_json(workload, program, estimates)
        print(json.dumps({"mode": args.mode} | origin(name, target) | longer | report), flush=True)
    else:
        if args.seq_len is None:
            fits = fitting(any(e.untried_kernels for e in estimates.values())).lower()
            print(f"the longest context that {fits}: {workload.seq_len:,} tokens, for prefill, decoding and loading")
            for reason in reasons:
                print(f"  not {reason}")
        head = f"{title(name, workload)}, kernel {workload.model.kernel}"
        print(inference_text(head, workload, program, estimates))
    if args.require_fit and not accepted.fits:
        return DOES_NOT_FIT
    return 0


def _with_seconds(accepted: Accepted, program: str, quick: bool) -> Accepted:
    """Add the estimate of the loading, and those that the seconds of `program` depend on."""
    chunked = program == PREFILL and accepted.workload.chunks > 1
    others = (FIRST_CHUNK, LOADING) if chunked else (LOADING,)
    workload, estimates = accepted = completed(accepted, others, log)
    if program == PREFILL and not quick:
        for name in estimates.keys() & {PREFILL, FIRST_CHUNK}:
            estimates[name] = with_machine_code(workload, estimates[name], log, name)
    return accepted
