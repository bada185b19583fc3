"""`ringformer estimate --mode=prefill|decode`."""

import argparse
import json
import sys

from ringformer.estimate.command_tools import DOES_NOT_FIT, log, origin
from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.inference.report import inference_json, inference_text
from ringformer.estimate.inference.search import Accepted, completed, first_accepted, likely, longest
from ringformer.estimate.inference.workload import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.program_estimate import NOT_TRIED
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
"""Flags that mean nothing without a train step, or that no program of inference has an answer for."""
MODEL_FLAGS = ("layout", "compute_dtype", "q_chunk", "k_chunk", "kernel")


def estimate_inference(args: argparse.Namespace) -> int:
    """Compile what `args.mode` names for a context, or for the longest that fits, and print what it takes. Raises
    ValueError for flags of training and for what no session can have."""
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
        found: Accepted | None
        if args.seq_len is None:
            found, reasons = longest(workload, **open_, log=log)
            if found is None:
                print("\n".join(["no context fits:", *(f"  {reason}" for reason in reasons)]))
                return DOES_NOT_FIT
        else:
            found = first_accepted(likely(workload, **open_)[: None if program == PREFILL else 1], program, log)
        workload, estimates = found = _with_seconds(found, program, args.quick)
    except CompilerFailure as failure:
        said = f"the compiler broke down, which says nothing of whether it fits: {failure}"
        print(f"ringformer estimate: {workload.name}: {said}", file=sys.stderr)
        return 1
    if args.json:
        of = {"mode": args.mode} | origin(workload.name, target)
        if args.seq_len is None:
            of["why_not_longer"] = reasons
        print(json.dumps(of | inference_json(workload, program, estimates)), flush=True)
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
    return DOES_NOT_FIT if args.require_fit and not found.fits else 0


def _with_seconds(found: Accepted, program: str, quick: bool) -> Accepted:
    """With the loading, and all that the seconds of `program` need."""
    if program == PREFILL and found.workload.chunks > 1:
        found = completed(found, (FIRST_CHUNK,), log)
    found = completed(found, (LOADING,), log)
    workload, estimates = found
    if program == PREFILL and not quick:
        for name in (name for name in (PREFILL, FIRST_CHUNK) if name in estimates):
            estimates[name] = with_machine_code(workload, estimates[name], log, name)
    return found


def _check(args: argparse.Namespace) -> None:
    for name in OF_TRAINING:
        if getattr(args, name) not in (None, False):
            raise ValueError(
                f"--{name} means nothing with --mode={args.mode}: leave it out, or estimate training with --mode=train"
            )
    if args.overrides:
        raise ValueError(f"unexpected arguments: {' '.join(args.overrides)}")
    for name in ("seq_len", "batch_size", "prefill_chunk", "q_chunk", "k_chunk"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
