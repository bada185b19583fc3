"""Setup of an evaluation: the model before its weights are loaded, its contexts, and the folder of the outputs."""

import argparse
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.checkpoints.rope_change import RopeChange, rope_change
from ringformer.evals.case_file import CaseFile, CheckRow
from ringformer.evals.model_folder import identity, is_hugging_face, model_folder
from ringformer.files.atomic import write_whole
from ringformer.files.output_place import check_output
from ringformer.files.resumed_lines import lock
from ringformer.files.run_layout import CASES, EVALS
from ringformer.inference.options import asked_dtype, load_generator
from ringformer.inference.text.run_text import RunText
from ringformer.inference.text.text_generator import TextGenerator
from ringformer.parallel.compilation_cache import keep_programs
from ringformer.parallel.mesh import simulate_cpu_devices
from ringformer.plotting import check_matplotlib
from ringformer.runs.config_file import register_models
from ringformer.settings import LARGEST

TABLE = "table.txt"
LOCK = "lock"
MOST_CASES = 1_000_000
"""Most cases, documents, questions or lines that an option asks for."""
UNITS = {"": 1, "K": 2**10, "M": 2**20}


def parse_numbers(text: str, parse: Callable[[str], Any], name: str) -> list[Any]:
    """Parse numbers separated by commas with `parse`; return them sorted, without duplicates. Raises ValueError for a
    part that `parse` refuses; in the message, `name` describes a valid number."""
    numbers = set()
    for part in text.split(","):
        try:
            numbers.add(parse(part))
        except ValueError:
            raise ValueError(f"{reprlib.repr(part)} is not a {name}") from None
    return sorted(numbers)


def parse_names(text: str | None) -> list[str] | None:
    """Parse names separated by commas; None: no text."""
    if not text:
        return None
    return list(filter(None, map(str.strip, text.split(","))))


def parse_lengths(text: str) -> list[int]:
    """Parse numbers of tokens like 4096 or 4K, separated by commas; return them sorted, without duplicates."""
    return parse_numbers(text, _parse_tokens, f"number of tokens like 4096 or 4K, at most {LARGEST:,}")


def _parse_tokens(text: str) -> int:
    number = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if not number:
        raise ValueError(text)
    tokens = int(number[1]) * UNITS[number[2]]
    if tokens > LARGEST:
        raise ValueError(text)
    return tokens


class Opened(NamedTuple):
    """Model of an evaluation, before its weights are loaded."""

    run: str
    text: RunText
    folder: Path
    args: argparse.Namespace
    identity: dict[str, Any]
    """Result of `model_folder.identity` when the model was opened."""
    lengths: list[int]
    """Contexts to evaluate, in tokens: those of `--lengths`, or the model's own."""

    @property
    def name(self) -> str:
        """Name of the run, its step and its rope if that was changed, for titles."""
        name = f"{Path(self.run).resolve().name}, step {self.identity['step'] or 0}"
        if self.text.rope is None:
            return name
        return f"{name}, {self.text.rope}"

    def title(self, evaluation: str) -> str:
        """Return the title of an evaluation whose cases are prompts."""
        title = f"{evaluation}: {self.name}"
        return f"{title}, chat" if self.args.chat else title

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the model that determine an outcome."""
        settings = self.identity | {"compute_dtype": asked_dtype(self.args, self.folder)}
        if self.args.cache_dtype != "compute":
            settings["cache_dtype"] = self.args.cache_dtype
        if self.text.rope is not None:
            settings |= self.text.rope.settings
        return settings

    def load(self, max_length: int) -> TextGenerator:
        """Load the model for prompts and answers of up to `max_length` tokens in total.

        Raises ValueError if a checkpoint was written after the model was opened, because that checkpoint may be the one
        that was loaded."""
        generator = load_generator(self.folder, self.args, max_length, self.text.rope)
        if identity(self.run) != self.identity:
            raise ValueError(f"{self.run} wrote a checkpoint while it was being read: start again")
        return TextGenerator(generator, self.text)

    @contextmanager
    def cases(self, name: str, settings: dict[str, Any], check: CheckRow) -> Iterator[CaseFile]:
        """Open an evaluation's file of cases, in the folder of its outputs, which is locked.

        Args:
          name: name of the evaluation.
          settings: settings that determine an outcome, besides those of the model.
          check: function that checks a row read from the file.
        """
        settings = self.settings | {"tokenizer": self.text.tokenizer.name} | settings
        with out_folder(self.args, name, (TABLE, f"{name}.png")) as folder:
            yield CaseFile(folder / CASES, name, settings, check)


def write_outputs(file: CaseFile, title: str, table: str, draw: Callable[..., None], *data: Any) -> None:
    """Print the table of an evaluation, and write it and the figure that `draw` makes of `data` beside the cases."""
    folder = file.path.parent
    figure = f"{file.evaluation}.png"
    text = f"{title}\n{table}\n"
    write_whole(folder / TABLE, text)
    print(text, end="")
    draw(*data, title, path=folder / figure)
    say(f"{folder}: {CASES}, {TABLE}, {figure}")


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Opened]:
    """Open the model that `--run` names. Raises ValueError for invalid options, before anything is computed."""
    for name in ("batch_size", "num_cases", "questions", "documents"):
        value = getattr(args, name, None)
        if value is not None and not 1 <= value <= MOST_CASES:
            raise ValueError(f"--{name}={value} must be at least 1, and at most {MOST_CASES:,}")
    if args.out is not None:
        check_output(args.out, "--out")
    check_matplotlib()
    simulate_cpu_devices(args.cpu_devices)
    keep_programs()
    register_models(args.config)
    if is_hugging_face(args.run) and not args.out:
        raise ValueError(f"{args.run} is a Hugging Face checkpoint, which is never written to: set --out")
    with opened_model(args, args.run, rope_change(args)) as model:
        yield model


@contextmanager
def opened_model(args: argparse.Namespace, run: str, rope: RopeChange | None = None) -> Iterator[Opened]:
    """Open the model of a run, of a converted model or of a Hugging Face checkpoint, with the options of the command
    except those of another rope: `rope`. Raises ValueError as `opened` does."""
    with model_folder(run, say) as folder:
        text = RunText(
            folder,
            tokenizer=args.tokenizer,
            template=getattr(args, "template", None),
            template_option=getattr(args, "template_option", None),
            allow=[args.allow],
            rope=rope,
        )
        yield Opened(run, text, folder, args, identity(run), _checked_lengths(args, run, text.context))


def _checked_lengths(args: argparse.Namespace, run: str, context: int | None) -> list[int]:
    """Return the contexts to evaluate. Raises ValueError for a length below 2 or beyond the context that the model was
    configured for."""
    lengths = [context] if context else []
    if args.lengths:
        lengths = parse_lengths(args.lengths)
    if not lengths:
        raise ValueError(f"{run} does not name its context: set --lengths")
    if lengths[0] < 2:
        raise ValueError(f"--lengths: a context of {lengths[0]} tokens is too short, it needs at least 2")
    if context is not None and lengths[-1] > context and not args.allow_longer:
        raise ValueError(
            f"--lengths: {lengths[-1]:,} tokens are more than the {context:,} that {run} was configured for: "
            "set --allow_longer to see where it breaks"
        )
    return lengths


@contextmanager
def out_folder(args: argparse.Namespace, name: str, writes: Sequence[str]) -> Iterator[Path]:
    """Create and lock the folder of the outputs.

    Args:
      name: the evaluation's.
      writes: names of the files that it replaces.

    Raises ValueError if another process writes to the folder, or if one of the files is there and no evaluation ever
    wrote to the folder."""
    folder = Path(args.out) if args.out is not None else Path(args.run) / EVALS / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out={folder}: the path, or part of it, is a file: choose another") from None
    if not any((folder / name).exists() for name in (LOCK, CASES)):
        for name in writes:
            if (folder / name).exists():
                raise ValueError(f"{folder} has a {name} that no evaluation wrote: choose another --out")
    with (folder / LOCK).open("a") as file:
        lock(file, folder)
        yield folder


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)
