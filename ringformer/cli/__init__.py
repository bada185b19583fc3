"""The command line `ringformer`: verbs, parsers, and the configs shipped with it."""

from ringformer.cli.command_line import main

__all__ = ["main"]
