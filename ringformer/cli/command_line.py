# PYTHON_ARGCOMPLETE_OK
"""`ringformer VERB`: find and call the verb's function; report users' mistakes in one line."""

import difflib
import os
import re
import sys
from importlib import import_module, metadata

from ringformer.cli.parser import LIKE_OPTION, Parser
from ringformer.cli.verbs import GROUPS, VERBS
from ringformer.cli.visible_text import visible

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "INTERNAL: Error dispatching computation: Out of memory"
"""Beginnings of JAX's error messages, on accelerators and on CPUs. The error's class is not available, because JAX is
not imported here."""


def make_parsers(verb: str | None = None) -> tuple[Parser, Parser]:
    """Return the parser of the whole command line, and the parser of `verb`. Only the latter has its options and
    `call`."""
    completion = 'Each verb has --help. Completion: eval "$(register-python-argcomplete ringformer)"'
    top = Parser("ringformer", description="Long-context training in JAX over a ring of devices.", epilog=completion)
    top.add_argument("--version", action="version", version=f"ringformer {metadata.version('ringformer')}")
    places = {"": top.add_subparsers(metavar="VERB", title="verbs", required=True)}
    chosen = top
    for name, (home, summary) in VERBS.items():
        group, _, last = name.rpartition(" ")
        if group not in places:
            inside = places[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            places[group] = inside.add_subparsers(metavar="VERB", title="verbs", required=True)
        parser = places[group].add_parser(last, help=summary, description=summary)
        if name == verb:
            module, function = home.split(":")
            parser.set_defaults(call=getattr(import_module(f"ringformer.{module}"), function)(parser))
            chosen = parser
    return top, chosen


def find_verb(words: list[str]) -> str | None:
    """Return the verb at the beginning of a command line, or None. Raises ValueError for an unknown verb."""
    verb = _verb_of(words)
    if verb is not None:
        return verb
    typed = " ".join(word for word in _typed_verb(words) if word[:1] != "-")
    if typed in ("", *GROUPS):
        return None
    hint = "see ringformer --help"
    near = difflib.get_close_matches(typed, [*VERBS, *GROUPS], 1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    group = words[0]
    if group in GROUPS:
        inside = [name.removeprefix(f"{group} ") for name in VERBS if name.startswith(f"{group} ")]
        hint += f" {group} has {', '.join(inside)}"
    raise ValueError(f"unknown verb {typed!r}; {hint}")


def _verb_of(words: list[str]) -> str | None:
    """Return the verb, of two words or one, at the beginning of a command line, or None."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in VERBS:
            return name
    return None


def _typed_verb(words: list[str]) -> list[str]:
    """Return the words of a command line where a verb stands: the first, and the second after the name of a group."""
    length = 2 if words and words[0] in GROUPS else 1
    return words[:length]


def run(words: list[str]) -> int:
    """Run a command line and return the exit code. Raises ValueError for a user's mistake."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    verb = find_verb(words)
    top, parser = make_parsers(verb)
    options = parser.join_values(words[len((verb or "").split()) :])
    overrides = parser.get_default("overrides") is not None
    valid = parser._option_string_actions
    for word in filter(LIKE_OPTION.match, options):
        name = word.partition("=")[0]
        if name not in valid and not (overrides and name.startswith("--config.")):
            option, dot, key = name.partition(".")
            hint = f"see {parser.prog} --help"
            near = difflib.get_close_matches(option, valid, 1, cutoff=0.85)
            near += [longer for longer in valid if longer.startswith(f"{option}_")]
            if near:
                hint = f"did you mean {near[0]}{dot}{key}?"
            raise ValueError(f"there is no option {name}; {hint}")
    if verb is None:
        top.parse_args(words or ["--help"])
    args, rest = parser.parse_known_args(options)
    if rest and not overrides:
        raise ValueError(f"unexpected arguments: {' '.join(rest)}; see {parser.prog} --help")
    if overrides:
        args.overrides = rest
    return args.call(args) or 0


def _shortened(text: str) -> str:
    """Return an error without the middle of names and values that would fill the screen."""
    return re.sub(r"(\S{100})\S{200,}(\S{100})", r"\1...\2", text)


def main(argv: list[str] | None = None) -> int:
    """Run a command line, print its errors and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if {"_ARGCOMPLETE", "COMP_LINE"} <= os.environ.keys():
        import argcomplete

        typed = os.environ["COMP_LINE"].split()[1:]
        argcomplete.autocomplete(make_parsers(_verb_of(typed))[0])
    command = " ".join(["ringformer", *_typed_verb(words)]).strip()
    try:
        code = run(words)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # after --help or --version
        return int(end.code or 0)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        print(f"{command}: {error.name} is not installed: pip install 'ringformer[train]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"{command}: {visible(_shortened(str(error)))}", file=sys.stderr)
        is_callers = isinstance(error, ValueError | FileNotFoundError)
        return 2 if is_callers else 1
    except MemoryError as error:
        print(f"{command}: out of memory: {visible(str(error)) or 'Python got no more'}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        why = str(error)
        if not why.startswith(OUT_OF_MEMORY):
            raise
        print(
            f"{command}: out of device memory: {why.splitlines()[0]}; `ringformer estimate` reports what fits",
            file=sys.stderr,
        )
        return 1
