"""The argument parser of a verb: defaults in its help, and errors that are exceptions."""

import argparse
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
