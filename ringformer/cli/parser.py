"""Argument parser of a verb, which shows defaults in its help and raises errors as exceptions; and types of options."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that adds an option's default to its help, where it is informative."""

    def _get_help_string(self, action):
        text = action.help or ""
        shown = action.option_strings and action.default not in (None, False, "", argparse.SUPPRESS)
        return f"{text} (default: %(default)s)" if shown and "default" not in text else text


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations of options. It raises errors as exceptions, and calls `more_help` to extend the
    help."""

    def __init__(self, prog: str | None = None, **options: Any):
        super().__init__(prog, allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        more = self.get_default("more_help")
        return super().format_help() + (f"\n{more()}\n" if more else "")


def output_file(text: str) -> Path:
    """Return the path of the file that --out names, after checking, without changing the file, that it can be written.

    Raises ValueError if it could not be written.
    """
    if not text:
        raise ValueError("--out= names no file; name one, or omit --out")
    path, flag = Path(text), f"--out={text}"
    if path.is_dir():
        raise ValueError(f"{flag} is a folder; name a file in it, e.g. {path / 'out.json'}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {path.parent}; create it, or choose another")
    existed = os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{flag} cannot be written ({error.strerror}); choose another folder") from None
    if not existed:
        path.unlink()
    return path


def output_argument(text: str) -> Path:
    """Return the path of `output_file`, as the `type` of --out in a plain argparse parser."""
    try:
        return output_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
