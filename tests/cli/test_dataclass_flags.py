"""Flags of a dataclass: what its fields say, no more and no less."""

import argparse
from dataclasses import dataclass
from typing import Literal

import pytest

from ringformer.cli.dataclass_flags import add_flags, describe_fields, field_docs, from_flags


@dataclass(frozen=True)
class Base:
    """Inherited."""

    source: str
    """Where from:
    100% of it."""
    quiet: bool = False


@dataclass(frozen=True)
class Options(Base):
    kind: Literal["near", "far"] = "near"
    """How far."""
    limit: int | None = None
    loud: bool = True


def parser(names=None):
    made = argparse.ArgumentParser("test")
    add_flags(made, Options, names)
    return made


def test_docstrings_of_fields_and_of_inherited_ones():
    assert field_docs(Options) == {"source": "Where from: 100% of it.", "kind": "How far."}


def test_flags_make_the_dataclass():
    args = parser().parse_args(["--source=x", "--kind=far", "--limit=3", "--quiet", "--no_loud"])
    assert from_flags(args, Options) == Options("x", True, "far", 3, False)
    assert from_flags(parser().parse_args(["--source=x"]), Options) == Options("x")
    assert from_flags(parser(["source"]).parse_args(["--source=x"]), Options) == Options("x")


@pytest.mark.parametrize("wrong", ([], ["--source=x", "--kind=middle"], ["--source=x", "--limit=many"]))
def test_what_the_fields_do_not_allow_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(wrong)
    assert "error" in capsys.readouterr().err


def test_help_has_the_docstrings(capsys):
    assert "where from: 100% of it" in parser().format_help() and "{near,far}" in parser().format_help()
    described = describe_fields(Options, "--config.x.")
    assert "  --config.x.kind = 'near'  {near,far}\n      How far." in described and "--config.x.source\n" in described
    assert "--config.x.source" not in describe_fields(Options, "--config.x.", but=("source",))
