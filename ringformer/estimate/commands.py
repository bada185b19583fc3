"""`ringformer estimate`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ringformer.estimate.workloads.command_tools import MODEL_FLAGS, given
from ringformer.runs.choices import Offload


@dataclass(frozen=True)
class EstimateOptions:
    """The flags of an estimate, except the model's settings (`MODEL_FLAGS`)."""

    target: str
    """v5e-256, v4-1024, v3-512, v5e:4x8, 8xH100, 2x32xH100, ..."""
    mode: Literal["train", "prefill", "decode"] = "train"
    """train: a training run; prefill: read the context into the cache; decode: generate one token with a full cache"""
    model: str | None = None
    """a preset (ringformer/models/families/), or the folder of a run or of a converted model; default: llama_7b"""
    config: str | None = None
    """path of a config file, instead of a preset"""
    stage: int | None = None
    """estimate only this stage of the config (1 is the first)"""
    mesh_dim: str | None = None
    """dp,fsdp,tp,sp; -1 for the rest (default of a preset: 1,1,1,-1)"""
    seq_len: int | None = None
    """tokens of a sequence; required with a preset. For inference: prompt and continuation together; default: the
    longest that fits"""
    prefill_chunk: int | None = None
    """for inference: tokens of a row that prefill reads at once; default: the fastest that fits"""
    cache_dtype: Literal["compute", "int8"] | None = None
    """for inference: dtype of the cached keys and values, compute (default: the compute dtype) or int8"""
    batch_size: int | None = None
    """sequences per step (default of a preset: 1)"""
    accumulate: int | None = None
    """microbatches per step (default of a preset: 1)"""
    optimizer_offload: Offload | None = None
    """part of the state in the host's memory: moments, state (weights, too), all (gradients, too) or none (default of
    a preset)"""
    host_gib: float | None = None
    """host memory for each device, in GiB; default: that of a usual host"""
    group_gb_per_s: float | None = None
    """for groups of GPUs (2x32xH100): GB/s of one GPU between groups, e.g. 1.6"""
    tokens: float | None = None
    """total training tokens, e.g. 1e9: adds days and device-hours"""
    json: bool = False
    """print one JSON object per line, one for each stage"""
    require_fit: bool = False
    """exit with code 3 if it does not fit"""
    generate_code: bool = False
    """compile to machine code, not only to a schedule: takes ten times as long on TPU, and shows that every program of
    a run compiles"""
    closed_form: bool = False
    """run no compiler: closed forms only, in a second"""
    quick: bool = False
    """model seconds from bytes and FLOPs at stated shares of the peak; default on TPU: from the machine code of a
    layer's attention, which takes a minute the first time"""


COUNTS = (
    "stage",
    "seq_len",
    "prefill_chunk",
    "batch_size",
    "accumulate",
    "remat_group",
    "head_groups",
    "q_chunk",
    "k_chunk",
)
"""Flags that must be at least 1."""


def add_estimate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer estimate`."""
    from ringformer.cli.dataclass_flags import add_flags
    from ringformer.estimate.workloads.state_flags import StateFlags
    from ringformer.models.decoder_config import DecoderConfig

    parser.description = (
        "Compile the programs of a run for a target and report memory, communication and overlap. With --config, "
        "overrides such as --config.model.ffn_chunk=512 change the configuration, and each stage of the config is "
        "estimated, with the days and device-hours of its tokens. Without --head_groups and --remat_group, a preset "
        "gets values that fit."
    )
    parser.set_defaults(overrides=[])
    add_flags(parser, EstimateOptions)
    add_flags(parser, StateFlags)
    add_flags(parser, DecoderConfig, MODEL_FLAGS, unset=True)
    return _estimate


def _estimate(args: argparse.Namespace) -> int:
    from ringformer.estimate.inference.commands import estimate_inference
    from ringformer.estimate.training_command import estimate_training
    from ringformer.estimate.workloads.targets import only_compilers
    from ringformer.settings import LARGEST

    for name, value in given(args, COUNTS).items():
        if not 1 <= value <= LARGEST:
            raise ValueError(f"--{name}={value} must be at least 1, and at most {LARGEST:,}")
    only_compilers()
    return estimate_training(args) if args.mode == "train" else estimate_inference(args)
