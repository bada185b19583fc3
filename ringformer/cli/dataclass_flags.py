"""Command-line flags and help from the fields of a dataclass, so that each option is declared only once."""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ringformer.cli.parser import Switch


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, including inherited ones: the string below each field, on one
    line. Fields without one are left out."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]  # a class
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type,
    names: Collection[str] | None = None,
    *,
    unset: bool = False,
    prefix: str = "",
) -> None:
    """Add a flag `--NAME` for each field of a dataclass, or for those named, with its type, default, choices and help.

    A boolean is a `Switch`; a field without a default is required. With `unset`, all defaults are None. This is for
    flags that override another value only if they are given. `prefix` precedes the names.
    """
    docs = field_docs(cls)
    types = get_type_hints(cls)
    for field in fields(cls):
        if names is not None and field.name not in names:
            continue
        kind, choices = _kind(types[field.name])
        options: dict[str, Any] = {"help": _as_help(docs.get(field.name, ""))}
        if field.default is MISSING and not unset:
            options["required"] = True
        else:
            options["default"] = None if unset else field.default
        if kind is bool:
            options["action"] = Switch
        else:
            options |= {"type": kind, "choices": choices}
        parser.add_argument(f"--{prefix}{field.name}", **options)


def _as_help(text: str) -> str:
    """Return a field's docstring as the help of an option: it begins in lower case, and one sentence has no period."""
    if text[:1].isupper() and text[1:2].islower():
        text = text[0].lower() + text[1:]
    if text.endswith(".") and not text.endswith("...") and ". " not in text:
        text = text[:-1]
    return text.replace("%", "%%")


def from_flags(args: argparse.Namespace, cls: type) -> Any:
    """Build the dataclass from parsed flags; fields without a flag keep their defaults."""
    given = {}
    for field in fields(cls):
        if hasattr(args, field.name):
            given[field.name] = getattr(args, field.name)
    return cls(**given)


def describe_fields(cls: type, prefix: str, but: Collection[str] = ()) -> str:
    """List the fields except `but`: for each, a line `PREFIX.NAME = default` with the docstring below it."""
    docs = field_docs(cls)
    types = get_type_hints(cls)
    lines = []
    for field in fields(cls):
        if field.name in but:
            continue
        line = f"  {prefix}{field.name}"
        if field.default is not MISSING:
            line += f" = {field.default!r}"
        _, choices = _kind(types[field.name])
        if choices:
            line += f"  {{{','.join(choices)}}}"
        lines.append(line)
        lines += textwrap.wrap(docs.get(field.name, ""), 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _kind(annotation: Any) -> tuple[type, list[str] | None]:
    """Return the type of a flag's value, and its choices; `X | None` counts as X."""
    if get_origin(annotation) is Literal:
        return str, list(get_args(annotation))
    if NoneType in get_args(annotation):
        (kind,) = set(get_args(annotation)) - {NoneType}
        return _kind(kind)
    return annotation, None
