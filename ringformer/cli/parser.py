"""The argument parser of a verb: defaults in its help, and errors that are exceptions; what an option may name."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """Says the default of an option, where it says something."""

    def _get_help_string(self, action):
        said = action.help or ""
        shown = action.option_strings and action.default not in (None, False, "", argparse.SUPPRESS)
        return f"{said} (default: %(default)s)" if shown and "default" not in said else said


class Parser(argparse.ArgumentParser):
    """Whole option names only; errors are a line; `more_help` is said below the help, and made only then."""

    def __init__(self, prog: str | None = None, **options: Any):
        super().__init__(prog, allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        more = self.get_default("more_help")
        return super().format_help() + (f"\n{more()}\n" if more else "")


def output_file(text: str, option: str = "--out") -> Path:
    """The path of a file that is written at the end of long work: it is looked at before, and left as it is.

    Raises ValueError if it could not be written.
    """
    if not text:
        raise ValueError(f"{option}= names no file; name one, or leave {option} out")
    path, said = Path(text), f"{option}={text}"
    if path.is_dir():
        raise ValueError(f"{said} is a folder; name a file in it, e.g. {path / 'out.json'}")
    if not path.parent.is_dir():
        raise ValueError(f"{said}: there is no folder {path.parent}; make it, or name a file in another")
    there = os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{said} cannot be written ({error.strerror}); name a file in another folder") from None
    if not there:
        path.unlink()
    return path


def output_argument(text: str) -> Path:
    """`output_file` as the `type` of an option of a plain argparse parser, the default included."""
    try:
        return output_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
