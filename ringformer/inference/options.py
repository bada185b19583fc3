"""Options of the commands that load a model for inference."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ringformer.cli.parser import Switch

if TYPE_CHECKING:
    from ringformer.checkpoints.rope_change import RopeChange
    from ringformer.inference.generator import Generator


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of the config file that registers a run's model."""
    parser.add_argument(
        "--config", metavar="FILE", help="the config file of the run, which is executed, if it registers the model"
    )


def add_model_options(parser: argparse.ArgumentParser, run_help: str, run_dest: str = "run") -> None:
    """Add the options of the model, its mesh and its tokenizer."""
    parser.add_argument("--run", dest=run_dest, metavar="DIR", required=True, help=run_help)
    add_config_option(parser)
    parser.add_argument(
        "--allow_longer", action=Switch, help="allow lengths beyond the context that the model was trained at"
    )
    parser.add_argument("--mesh_dim", default="1,1,1,1", help="sizes of dp,fsdp,tp,sp; -1: the remaining devices")
    parser.add_argument(
        "--cpu_devices",
        type=int,
        default=0,
        help="simulate this many devices on the CPU; default: the machine's own devices",
    )
    parser.add_argument(
        "--prefill_chunk",
        type=int,
        metavar="TOKENS",
        help="read prompts in chunks of this many tokens; default: whole prompts",
    )
    parser.add_argument(
        "--compute_dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights and activations; default: float32 on CPUs, that of the run elsewhere",
    )
    parser.add_argument(
        "--cache_dtype",
        choices=("compute", "int8"),
        default="compute",
        help="dtype of the cached keys and values; int8 takes half the memory of bfloat16, with a small error; "
        "default: compute, the compute dtype",
    )
    parser.add_argument(
        "--kernel",
        choices=("auto", "xla", "pallas", "cudnn"),
        default="auto",
        help="attention kernel; default: auto, the best for these devices, regardless of the run's",
    )
    parser.add_argument(
        "--kernel_check",
        action=Switch,
        default=True,
        help="use the attention kernel without comparing it with XLA's blocks",
    )
    for name, what in (("q_chunk", "queries"), ("k_chunk", "keys")):
        parser.add_argument(
            f"--{name}", type=int, metavar="TOKENS", help=f"{what} of a chunk pair of the attention; default: the run's"
        )
    parser.add_argument(
        "--tokenizer",
        help="bytes, a SentencePiece .model file, a tokenizer.json, or a folder with one of them; default: the run's",
    )
    parser.add_argument(
        "--allow",
        choices=("data.tokenizer",),
        help="allow a --tokenizer that is not the one that the model was trained with",
    )
    from ringformer.checkpoints.rope_change import add_rope_options

    add_rope_options(parser)


def add_template_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of the chat template."""
    from ringformer.data.chats.templates import TemplateName

    parser.add_argument(
        "--template",
        choices=get_args(TemplateName),
        help="the chat template; default: that of the run's conversations, else the tokenizer's own",
    )
    parser.add_argument(
        "--template_option",
        metavar="NAME=VALUE,...",
        help="variables of a tokenizer's own template, e.g. enable_thinking=false; default: the run's",
    )


def check_template_option(args: argparse.Namespace) -> None:
    """Raise ValueError for variables of a chat template without --chat, which nothing would read."""
    if args.template_option is not None and not args.chat:
        raise ValueError("--template_option sets variables of the template of a --chat: add --chat, or leave it out")


def asked_dtype(args: argparse.Namespace, folder: str | Path) -> str:
    """Return the compute dtype of the command for the model in `folder`: --compute_dtype, or the default here."""
    import jax

    from ringformer.checkpoints.saved_model import model_of
    from ringformer.inference.inference_config import usual_dtype
    from ringformer.models.registry import as_decoder

    return args.compute_dtype or usual_dtype(as_decoder(model_of(folder), folder), jax.default_backend())


def load_generator(
    folder: str | Path, args: argparse.Namespace, max_length: int, rope: "RopeChange | None"
) -> "Generator":
    """Load the model in `folder` with the options of the command, except those of another rope: `rope`."""
    from ringformer.checkpoints.saved_model import model_of
    from ringformer.inference.generator import Generator

    if rope is not None and (warning := rope.warning(model_of(folder))):
        print(warning, file=sys.stderr)

    trained = model_of(folder).compute_dtype
    computed = asked_dtype(args, folder)
    if args.compute_dtype is None and computed != trained:
        print(
            f"computing in {computed}, the fastest on CPUs; --compute_dtype={trained}, which takes half of the memory, "
            f"is the dtype of {folder}",
            file=sys.stderr,
        )
    since = time.monotonic()
    generator = Generator.load(
        folder,
        mesh_dim=args.mesh_dim,
        max_length=max_length,
        prefill_chunk=args.prefill_chunk,
        compute_dtype=computed,
        cache_dtype=args.cache_dtype,
        kernel=args.kernel,
        kernel_check=args.kernel_check,
        q_chunk=args.q_chunk,
        k_chunk=args.k_chunk,
        rope=rope,
    )
    if not generator.kernel.startswith("kernel xla") or "WARNING" in generator.kernel:
        print(generator.kernel, file=sys.stderr)
    lasted = time.monotonic() - since
    if lasted >= 1:
        print(f"loading {folder} took {lasted:,.0f} s", file=sys.stderr)
    return generator
