"""The command line `ringformer`: its verbs, their parsers, and the configs that come with it."""

from ringformer.cli.command_line import main

__all__ = ["main"]
