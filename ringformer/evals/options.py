"""Options that evaluations share, and what is opened by them."""

import argparse
import fcntl
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

if TYPE_CHECKING:
    from ringformer.inference.run_text import RunText
    from ringformer.inference.text_generator import TextGenerator

UNITS = {"": 1, "K": 2**10, "M": 2**20}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model, its mesh, the lengths and the folder of the outputs."""
    parser.add_argument(
        "--run",
        metavar="DIR",
        required=True,
        help="the folder of a run, of a stage of one, of a converted model, or of a Hugging Face "
        "checkpoint, which is converted for the while",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the config file of the run, executed, if it registers the model"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="the folder of cases.jsonl, table.txt and the PNG; cases that it "
        "has are not evaluated again; default: evals/NAME in the run's",
    )
    parser.add_argument(
        "--allow_longer", action="store_true", help="go beyond the context that the model was configured for"
    )
    parser.add_argument("--batch_size", type=int, default=1, help="cases of a length that are evaluated at once")
    parser.add_argument("--mesh_dim", default="1,1,1,1", help="sizes of dp,fsdp,tp,sp; -1 is the rest")
    parser.add_argument(
        "--cpu_devices", type=int, default=0, help="simulate so many devices on the CPU; default: the machine's own"
    )
    parser.add_argument(
        "--prefill_chunk", type=int, metavar="TOKENS", help="read prompts in chunks of so many tokens; default: at once"
    )
    parser.add_argument("--compute_dtype", help="float32 or bfloat16; default: that of the run")
    parser.add_argument(
        "--tokenizer",
        help="bytes, a SentencePiece .model file, a tokenizer.json, or a folder with one of them; default: the run's",
    )


def add_lengths(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Contexts in tokens."""
    parser.add_argument(
        "--lengths",
        type=parse_lengths,
        required=required,
        metavar="TOKENS,...",
        help="contexts in tokens, of prompt and answer together, e.g. 4096,8192 or 4K,8K",
    )


def add_case_options(parser: argparse.ArgumentParser, num_cases: int | None, said: str) -> None:
    """What cases there are, and how a prompt is given."""
    from ringformer.data.chats.templates import TemplateName

    parser.add_argument("--num_cases", type=int, default=num_cases, help=f"cases of each {said}")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: 0)")
    parser.add_argument("--chat", action="store_true", help="give prompts through the model's chat template")
    parser.add_argument(
        "--template",
        choices=get_args(TemplateName),
        help="the chat template; default: that of the run's conversations, else the tokenizer's own",
    )


def parse_lengths(text: str) -> list[int]:
    """Numbers of tokens, 4096 or 4K each, separated by commas; distinct, in their order."""
    found = set()
    for part in text.split(","):
        number = re.fullmatch(r"(\d+)([KM]?)", part.strip().upper())
        if not number:
            raise argparse.ArgumentTypeError(f"{part!r} is no number of tokens; 4096 or 4K for example")
        found.add(int(number[1]) * UNITS[number[2]])
    return sorted(found)


class Opened(NamedTuple):
    """The model of an evaluation, before its weights are loaded."""

    text: "RunText"
    folder: Path
    args: argparse.Namespace
    identity: dict[str, Any]
    """Of `model_folder.identity`, when it was opened."""

    def load(self, max_length: int) -> "TextGenerator":
        """The model, for prompts and answers of up to `max_length` tokens.

        Raises ValueError if a checkpoint was written since it was opened: it may be the one that was read."""
        from ringformer.evals.model_folder import identity
        from ringformer.inference.generator import Generator
        from ringformer.inference.text_generator import TextGenerator

        generator = Generator.load(
            self.folder,
            mesh_dim=self.args.mesh_dim,
            max_length=max_length,
            prefill_chunk=self.args.prefill_chunk,
            compute_dtype=self.args.compute_dtype,
        )
        if identity(self.args.run) != self.identity:
            raise ValueError(f"{self.args.run} wrote a checkpoint while it was read: start again")
        return TextGenerator(generator, self.text)

    @property
    def settings(self) -> dict[str, Any]:
        """What of the model and of the options decides an outcome."""
        from ringformer.checkpoints.saved_model import model_of

        dtype = self.args.compute_dtype or model_of(self.folder).compute_dtype
        return self.identity | {"tokenizer": self.text.tokenizer.name, "compute_dtype": dtype}


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Opened]:
    """What `--run` names. Raises ValueError for options that cannot be, before anything is computed."""
    from ringformer.parallel.mesh import simulate_cpu_devices
    from ringformer.plotting import check_matplotlib

    for name in ("batch_size", "num_cases"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
    check_matplotlib()
    simulate_cpu_devices(args.cpu_devices)
    from ringformer.evals.model_folder import identity, is_hugging_face, model_folder
    from ringformer.inference.run_text import RunText
    from ringformer.runs.config_file import register_models

    register_models(args.config)
    if is_hugging_face(args.run) and not args.out:
        raise ValueError(f"{args.run} is a Hugging Face checkpoint, which stays as it is: name the outputs' --out")
    with model_folder(args.run, say) as folder:
        text = RunText(folder, tokenizer=args.tokenizer, template=getattr(args, "template", None))
        yield Opened(text, folder, args, identity(args.run))


@contextmanager
def out_folder(args: argparse.Namespace, name: str) -> Iterator[Path]:
    """Where the outputs go: a folder that no other process writes to meanwhile. Raises ValueError if one does."""
    folder = Path(args.out) if args.out else Path(args.run) / "evals" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out={folder}: there is a file of this name, or on the way: name another") from None
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # which of the two, the system chooses
            raise ValueError(f"another evaluation writes to {folder}: wait for it, or choose another --out") from None
        yield folder


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
