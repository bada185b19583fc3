"""Argument parser of a verb, which shows defaults in its help and raises errors as exceptions; and types of options."""

import argparse
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ringformer.files.output_place import check_output
from ringformer.settings import whole_number

LIKE_OPTION = re.compile("--?[A-Za-z]")
"""Beginning of a word that is an option; a negative number is a value."""


class Switch(argparse.Action):
    """Boolean option: `--NAME` or `--NAME=true`, and `--no_NAME` or `--NAME=false`, as for keys of a config.

    Help shows only the spelling that changes the default; both, if the default is None.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, default: bool | None = False, **options: Any):
        yes = list(option_strings)
        no = [f"--no_{name.removeprefix('--')}" for name in yes]
        self.no = no
        self.shown: list[str] = []
        if not default:
            self.shown += yes
        if default is not False:
            self.shown += no
        super().__init__([*yes, *no], dest, nargs=0, default=default, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self.no)

    def format_usage(self) -> str:
        return " | ".join(self.shown)


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that adds an option's default to its help, where it is informative."""

    def _format_action_invocation(self, action):
        if isinstance(action, Switch):
            return ", ".join(action.shown)
        return super()._format_action_invocation(action)

    def _get_help_string(self, action):
        text = action.help or ""
        shown = action.option_strings and action.default not in (None, False, True, "", argparse.SUPPRESS)
        if shown and "default" not in text:
            text += " (default: %(default)s)"
        return text


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations of options. It raises errors as exceptions, and calls `more_help` to extend the
    help."""

    def __init__(self, prog: str | None = None, **options: Any):
        super().__init__(prog, allow_abbrev=False, formatter_class=HelpFormatter, **options)
        self.register("type", int, _whole_number)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        text = super().format_help()
        more = self.get_default("more_help")
        if more:
            text += f"\n{more()}\n"
        return text

    def join_values(self, words: list[str]) -> list[str]:
        """Return the words after a verb, with `--option VALUE` written as `--option=VALUE`, underscores in the names of
        options, and the values of booleans in their names.

        The word after an option that takes a value is its value, unless it looks like an option (`LIKE_OPTION`). Keys
        of the config (`--config.KEY`) may also stand alone: `load_config` sees which of them are booleans.

        Raises ValueError for another option without its value.
        """
        overrides = self.get_default("overrides") is not None
        valued = {name for name, action in self._option_string_actions.items() if action.nargs != 0}
        joined: list[str] = []
        rest = deque(words)
        while rest:
            word = self._spelled(rest.popleft())
            is_key = overrides and word.startswith("--config.") and "=" not in word
            if word in valued or is_key:
                if rest and not LIKE_OPTION.match(rest[0]):
                    word = f"{word}={rest.popleft()}"
                elif not is_key:
                    example = rest[0] if rest else "VALUE"
                    raise ValueError(
                        f"{word} needs a value; one that begins with a dash follows an equals sign: {word}={example}"
                    )
            joined.append(word)
        return joined

    def _spelled(self, word: str) -> str:
        """Return `--some-option` as `--some_option`, and `--switch=false` as `--no_switch`; other words as they are."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name.startswith("--config."):
            return word
        name = "--" + name[2:].replace("-", "_")
        if not isinstance(self._option_string_actions.get(name), Switch) or value not in ("true", "false"):
            return name + equals + value
        if value == "true":
            return name
        return f"--no_{name[2:]}"


def _whole_number(text: str) -> int:
    """Return the whole number of an option. Raises ArgumentTypeError, whose message argparse shows."""
    try:
        return whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_file(text: str) -> Path:
    """Return the path of the file that --out names, after checking, without changing the file, that it can be written.

    Raises ValueError if it could not be written.
    """
    path = check_output(text, "--out")
    flag = f"--out={text}"
    if path.is_dir():
        raise ValueError(f"{flag} is a folder; name a file in it, e.g. {path / 'out.json'}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {path.parent}; create it, or choose another")
    existed = os.path.lexists(path)
    if path.exists() and not path.is_file():
        return path  # a pipe or a device: opening it may wait, and closing it ends what reads it
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
