"""`ringformer estimate`."""

import argparse
from collections.abc import Callable

from ringformer.estimate.command_tools import DOES_NOT_FIT, MODEL_FLAGS


def add_estimate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Arguments of `ringformer estimate`."""
    parser.description = (
        "Compile the programs of a run for a target and report memory, communication and overlap. With --config, "
        "overrides such as --config.model.ffn_chunk=512 change the configuration, and each stage of the config is "
        "estimated, with the days and device-hours of its tokens. Without --head_groups and --remat_group, a preset "
        "gets values that fit."
    )
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "--mode",
        choices=("train", "prefill", "decode"),
        default="train",
        help="train: a training run; prefill: the context is read into the cache; decode: one token, the cache full",
    )
    parser.add_argument("--model", help="a preset (ringformer/models/llama_presets.py); default: llama_7b")
    parser.add_argument("--config", metavar="FILE", help="a config file instead of a preset")
    parser.add_argument("--stage", type=int, help="estimate only this stage of the config (1 is the first)")
    parser.add_argument("--target", required=True, help="v5e-256, v4-1024, v3-512, v5e:4x8, 8xH100, ...")
    parser.add_argument("--mesh_dim", help="dp,fsdp,tp,sp; -1 for the rest (default of a preset: 1,1,1,-1)")
    parser.add_argument(
        "--seq_len",
        type=int,
        help="tokens of a sequence; required with a preset. For inference: prompt and continuation together; default: "
        "the longest that fits",
    )
    parser.add_argument(
        "--prefill_chunk",
        type=int,
        help="for inference: tokens of a row that prefill reads at once; default: the best that fit",
    )
    parser.add_argument("--batch_size", type=int, help="sequences per step (default of a preset: 1)")
    parser.add_argument("--accumulate", type=int, help="microbatches per step (default of a preset: 1)")
    from ringformer.cli.dataclass_flags import add_flags
    from ringformer.models.llama_config import LlamaConfig

    add_flags(parser, LlamaConfig, MODEL_FLAGS, unset=True)
    parser.add_argument("--tokens", type=float, help="total training tokens, e.g. 1e9: adds days and device-hours")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, one for each stage")
    parser.add_argument("--require_fit", action="store_true", help=f"exit with code {DOES_NOT_FIT} if it does not fit")
    parser.add_argument(
        "--generate_code",
        action="store_true",
        help="compile to machine code, not only to a schedule: takes ten times as long on TPU, and shows that every "
        "program of a run compiles",
    )
    parser.add_argument("--closed_form", action="store_true", help="run no compiler: closed forms only, in a second")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="model seconds from bytes and FLOPs at stated shares of the peak; default on TPU: from the machine code "
        "of a layer's attention, which takes a minute, once",
    )
    return _estimate


def _estimate(args: argparse.Namespace) -> int:
    if args.mode == "train":
        from ringformer.estimate.training_command import estimate_training

        return estimate_training(args)
    from ringformer.estimate.inference.commands import estimate_inference

    return estimate_inference(args)
