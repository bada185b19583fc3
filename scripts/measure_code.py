"""Measure how the code reads: the sizes of rooms, files and functions, and how dense their lines are.

    python scripts/measure_code.py [FOLDER] [--largest N]

Tokens are those of Python's tokenizer, without comments, line ends and indentation: the layout of the code does not
count, and a docstring is one token. Nothing limits these numbers; CONTRIBUTING.md says what to look for.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "ringformer"
LAYOUT = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Function(NamedTuple):
    """A function or a method."""

    place: str
    """Its file and name."""
    lines: int
    tokens: int
    names: int
    """Names that it binds: parameters, variables, loops, comprehensions and functions inside of it."""


class File(NamedTuple):
    """A file of Python."""

    path: Path
    """Relative to the folder that is measured."""
    tokens: int
    functions: list[Function]
    comprehensions: int
    conditional_expressions: int
    assignments: int
    parallel_assignments: int
    """Assignments such as `a, b = x, y`."""

    @property
    def room(self) -> str:
        return str(self.path.parent)


def measure_file(path: Path, folder: Path) -> File:
    """Measure a file in a folder."""
    text = path.read_text()
    tree = ast.parse(text)
    lines_of_tokens = [
        token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in LAYOUT
    ]
    name = path.relative_to(folder)
    nodes = list(ast.walk(tree))
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    return File(
        name,
        len(lines_of_tokens),
        [_measure_function(node, str(name), lines_of_tokens) for node in nodes if isinstance(node, FUNCTIONS)],
        sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        sum(isinstance(node, ast.IfExp) for node in nodes),
        len(assignments),
        sum(isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) for node in assignments),
    )


def _measure_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, file: str, lines_of_tokens: Sequence[int]
) -> Function:
    end = function.end_lineno or function.lineno
    tokens = sum(function.lineno <= line <= end for line in lines_of_tokens)
    return Function(f"{file}:{function.name}", end - function.lineno + 1, tokens, len(set(_bound_names(function))))


def _bound_names(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node is not function:
            yield node.name


def measure(folder: Path) -> list[File]:
    """Measure the files below a folder. Raises ValueError if there are none."""
    files = [measure_file(path, folder) for path in sorted(folder.rglob("*.py"))]
    if not files:
        raise ValueError(f"{folder} has no file of Python")
    return files


def table(files: Sequence[File]) -> str:
    """Tabulate what describes all of the code."""
    functions = [function for file in files for function in file.functions]
    tokens = sum(file.tokens for file in files)
    lines = sorted(function.lines for function in functions)
    sizes = sorted(function.tokens for function in functions)
    parallel = sum(file.parallel_assignments for file in files)
    rows = {
        "files; tokens": f"{len(files):,}; {tokens:,}",
        "tokens of a file, median / p95 / max": _spread(sorted(file.tokens for file in files)),
        "lines of a function, median / p95 / max": _spread(lines),
        "tokens of a function, median / p95 / max": _spread(sizes),
        "comprehensions per 10,000 tokens": f"{1e4 * sum(file.comprehensions for file in files) / tokens:.1f}",
        "conditional expressions per 10,000 tokens": (
            f"{1e4 * sum(file.conditional_expressions for file in files) / tokens:.1f}"
        ),
        "parallel assignments, of all assignments": (
            f"{parallel / max(1, sum(file.assignments for file in files)):.1%}"
        ),
        "names bound in the fullest function": f"{max((function.names for function in functions), default=0)}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _spread(values: Sequence[int]) -> str:
    if not values:
        return "-"
    last = len(values) - 1
    return f"{values[last // 2]:,} / {values[int(0.95 * last)]:,} / {values[last]:,}"


def largest(files: Sequence[File], count: int) -> str:
    """List the rooms with their tokens, and the largest and fullest `count` of files and functions."""
    rooms: dict[str, int] = {}
    for file in files:
        rooms[file.room] = rooms.get(file.room, 0) + file.tokens
    functions = [function for file in files for function in file.functions]
    lists = {
        "tokens of rooms, without the rooms inside": list(rooms.items()),
        "tokens of files": [(str(file.path), file.tokens) for file in files],
        "tokens of functions": [(function.place, function.tokens) for function in functions],
        "names bound in functions": [(function.place, function.names) for function in functions],
    }
    text = []
    for title, values in lists.items():
        ordered = sorted(values, key=lambda value: -value[1])
        shown = ordered if values is lists["tokens of rooms, without the rooms inside"] else ordered[:count]
        text += ["", f"{title}:", *(f"{number:>9,}  {name}" for name, number in shown)]
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE, help="default: the package")
    parser.add_argument("--largest", type=int, default=10, metavar="N", help="files and functions to list; default: 10")
    options = parser.parse_args(arguments)
    try:
        files = measure(options.folder)
    except ValueError as error:
        parser.error(str(error))
    print(table(files))
    print(largest(files, options.largest))


if __name__ == "__main__":
    main()
