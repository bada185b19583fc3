"""`ringformer estimate --mode=prefill|decode`."""

import argparse
import json
import sys

from ringformer.estimate.command_tools import DOES_NOT_FIT, log
from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.inference.report import inference_json, inference_text
from ringformer.estimate.inference.search import Accepted, completed, first_accepted, likely, longest
from ringformer.estimate.inference.workload import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.program_estimate import NOT_TRIED
from ringformer.estimate.report import origin
from ringformer.estimate.seconds.kernel_cycles import with_machine_code
from ringformer.estimate.targets import find_target, only_compilers
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset

PROGRAM = {"prefill": PREFILL, "decode": DECODE}
OF_TRAINING = (
    "config",
    "stage",
    "accumulate",
    "tokens",
    "attention",
    "remat",
    "remat_group",
    "head_groups",
    "offload",
    "generate_code",
    "closed_form",
)
"""Flags that apply only to a train step, or that programs of inference do not support."""
MODEL_FLAGS = ("layout", "compute_dtype", "q_chunk", "k_chunk", "kernel")


def estimate_inference(args: argparse.Namespace) -> int:
    """Compile prefill or decoding (`args.mode`) for a context, or for the longest that fits, and print the report.
    Raises ValueError for flags of training and for settings that no session can have."""
    _check(args)
    only_compilers()
    target = find_target(args.target)
    target.require_compiler()
    settings = {name: value for name in MODEL_FLAGS if (value := getattr(args, name)) is not None}
    model = LlamaConfig(**preset(args.model or "llama_7b") | settings)
    workload = InferenceWorkload(
        model,
        target,
        args.mesh_dim or "1,1,1,-1",
        args.seq_len or 0,
        args.batch_size or 1,
        name=args.model or "llama_7b",
        prefill_chunk=args.prefill_chunk,
    )
    program = PROGRAM[args.mode]
    reasons: list[str] = []
    open_ = {"mesh": args.mesh_dim is None, "chunk": args.prefill_chunk is None}
    try:
        accepted: Accepted | None
        if args.seq_len is None:
            accepted, reasons = longest(workload, **open_, log=log)
            if accepted is None:
                print("\n".join(["no context fits:", *(f"  {reason}" for reason in reasons)]))
                return DOES_NOT_FIT
        else:
            accepted = first_accepted(likely(workload, **open_)[: None if program == PREFILL else 1], program, log)
        workload, estimates = accepted = _with_seconds(accepted, program, args.quick)
    except CompilerFailure as failure:
        print(f"ringformer estimate: {workload.name}: {failure.meaning}{failure}", file=sys.stderr)
        return 1
    if args.json:
        origins = {"mode": args.mode} | origin(workload.name, target)
        if args.seq_len is None:
            origins["why_not_longer"] = reasons
        print(json.dumps(origins | inference_json(workload, program, estimates)), flush=True)
    else:
        title = (
            f"{workload.name}, {workload.batch_size} x {workload.seq_len:,} tokens, mesh {workload.mesh_dim}, "
            f"{args.target}, kernel {workload.model.kernel}"
        )
        if args.seq_len is None:
            untried = any(e.untried_kernels for e in estimates.values())
            fits = f"should fit, {NOT_TRIED}" if untried else "fits"
            print(f"the longest context that {fits}: {workload.seq_len:,} tokens, for prefill, decoding and loading")
            print("\n".join(f"  not {reason}" for reason in reasons))
        print(inference_text(title, workload, program, estimates))
    return DOES_NOT_FIT if args.require_fit and not accepted.fits else 0


def _with_seconds(accepted: Accepted, program: str, quick: bool) -> Accepted:
    """Add the loading and everything that the seconds of `program` depend on."""
    if program == PREFILL and accepted.workload.chunks > 1:
        accepted = completed(accepted, (FIRST_CHUNK,), log)
    workload, estimates = accepted = completed(accepted, (LOADING,), log)
    if program == PREFILL and not quick:
        for name in (name for name in (PREFILL, FIRST_CHUNK) if name in estimates):
            estimates[name] = with_machine_code(workload, estimates[name], log, name)
    return accepted


def _check(args: argparse.Namespace) -> None:
    for name in OF_TRAINING:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name} does not apply to --mode={args.mode}: leave it out, or use --mode=train")
    if args.overrides:
        raise ValueError(f"unexpected arguments: {' '.join(args.overrides)}")
    for name in ("seq_len", "batch_size", "prefill_chunk", "q_chunk", "k_chunk"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
