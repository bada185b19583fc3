"""`ringformer convert from-hf | to-hf | to-peft | verify`."""

import argparse
import re
import reprlib
from collections.abc import Callable
from pathlib import Path

from ringformer.inference.options import add_config_option

SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_from_hf(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer convert from-hf`."""
    parser.description = (
        "Convert a Hugging Face model (safetensors) to a folder for `ringformer train --config.init_from=OUT`. It is "
        "converted block by block: host memory stays below 2 GB for a model of any size."
    )
    parser.add_argument(
        "path", metavar="PATH", help="the folder with config.json and *.safetensors, or hf://ORGANISATION/NAME"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", default="float32", help="dtype on disk: float32, bfloat16 or float16")
    parser.add_argument(
        "--adapters", metavar="PEFT", help="a folder of PEFT's with LoRA adapters to add to the weights"
    )
    from ringformer.checkpoints.rope_change import add_rope_options

    add_rope_options(parser, converts=True)
    return _from_hf


def _from_hf(args: argparse.Namespace) -> None:
    from ringformer.checkpoints.rope_change import rope_change
    from ringformer.convert.hf_config import KEPT
    from ringformer.convert.import_hf import from_hf
    from ringformer.files.run_layout import HF_CONFIG
    from ringformer.files.untrusted import read_object

    config = from_hf(args.path, args.out, args.dtype, args.adapters, rope_change(args))
    rope = "without rotary positions"
    if any(config.ropes):
        rope = f"rope theta {config.rope_theta:g}, scaling {config.rope_scaling.kind}"
    print(f"{args.out}: {config.num_params / 1e6:,.1f}M parameters in {args.dtype}, {rope}")
    imported = read_object(args.out, HF_CONFIG)
    for key in KEPT:
        if key in imported:
            print(f"{key}: other programs use it; ringformer and transformers do not. Exports keep it")


def add_to_hf(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer convert to-hf`."""
    parser.description = "Export a run's latest checkpoint, or a converted model, to a folder that transformers loads."
    parser.add_argument("ckpt", metavar="CKPT", help="the folder of a run, with config.json and checkpoints/")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16; default: that of the original Hugging Face model, else as stored",
    )
    add_config_option(parser)
    parser.add_argument("--shard_size", default="5GB", type=_bytes, help="maximum size of a file, e.g. 5GB or 500MB")
    return _to_hf


def _to_hf(args: argparse.Namespace) -> None:
    from ringformer.convert.export_hf import to_hf
    from ringformer.inference.text.beginning import beginning_of
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    exported = to_hf(args.ckpt, args.out, args.dtype, args.shard_size)
    choice = "" if args.dtype else "; set --dtype to change it"
    print(
        f"{args.out}: {exported.config.num_params / 1e6:,.1f}M parameters in {exported.dtype}, "
        f"{exported.dtype_origin}{choice}"
    )
    if exported.left_out:
        print(f"left out of config.json: {', '.join(exported.left_out)}")
    beginning = beginning_of(Path(args.ckpt))
    if beginning and (otherwise := beginning.describe_export()):
        print(otherwise)


def add_to_peft(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer convert to-peft`."""
    parser.description = "Export the adapters of a run with --config.lora.rank to a folder that PEFT loads."
    parser.add_argument("ckpt", metavar="CKPT", help="the folder of a run, with config.json and checkpoints/")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    add_config_option(parser)
    return _to_peft


def _to_peft(args: argparse.Namespace) -> None:
    from ringformer.checkpoints.saved_model import base_of
    from ringformer.convert.peft import to_peft
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    count = to_peft(args.ckpt, args.out)
    print(f"{args.out}: {count:,} parameters in float32, adapters of the weights in {base_of(args.ckpt)}")


def add_verify(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer convert verify`."""
    parser.description = (
        "Compare next-token distributions of transformers and ringformer on the CPU in float32, on a text if HF has a "
        "tokenizer, else on random ids. Exit code 1 if they differ by more than a multiple of the difference between "
        "transformers' own eager and sdpa attention. Parameters of CKPT are first rounded to the dtype of HF's "
        "tensors. Only one model is in memory at a time."
    )
    parser.add_argument("hf", metavar="HF", help="the folder of a Hugging Face checkpoint")
    parser.add_argument("ckpt", metavar="CKPT", help="the folder of a run or a converted model")
    add_config_option(parser)
    parser.add_argument(
        "--length", type=int, help="number of tokens to compare on; default: the model's context, at most 512"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random ids")
    return _verify


def _verify(args: argparse.Namespace) -> int:
    from ringformer.convert.verify_logits import verify
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    comparison = verify(args.hf, args.ckpt, length=args.length, seed=args.seed)
    print(comparison)
    return 0 if comparison.agrees else 1


def _bytes(text: str) -> int:
    size = re.fullmatch(r"(\d+(?:\.\d+)?) *(KB|MB|GB|)", text.upper())
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 5GB or 500MB")
    count = float(size[1]) * SIZE_UNITS[size[2]]
    if not 1 <= count < 2**63:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is {count:g} bytes: give a size like 5GB or 500MB")
    return int(count)
