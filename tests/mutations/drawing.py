"""Draw mutants from source files by a seed: one operator, constant, index or axis name becomes another.

Only the text of this one piece changes. Docstrings, other strings, annotations, raised errors, asserts and `__repr__`
stay as they are.
"""

import ast
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.commit import ROOT

KINDS = ("comparison", "constant", "sign", "index", "axis name")

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""For each comparison: its text, and the text that replaces it."""

SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}

AXES = {"dp": "fsdp", "fsdp": "sp", "sp": "tp", "tp": "sp"}
"""For each axis of the mesh, the one that replaces it."""

SILENT = ("__repr__", "__str__")
"""Functions that only make messages."""


class Mutant(NamedTuple):
    """A change of one piece of a file."""

    kind: str
    file: str
    """From the repository's root."""
    line: int
    start: int
    """In characters from the file's beginning."""
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}+{self.start}: {self.old} -> {self.new}"

    def mutated(self, text: str) -> str:
        """Return the file's text with the change."""
        end = self.start + len(self.old)
        assert text[self.start : end] == self.old
        return text[: self.start] + self.new + text[end:]


def draw(files: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants, in turn of each kind: as many of each, unless a kind has fewer places."""
    generator = random.Random(seed)
    places: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for file in sorted(files):
        for mutant in Places(file, (ROOT / file).read_text()).mutants():
            places[mutant.kind].append(mutant)
    for mutants in places.values():
        generator.shuffle(mutants)
    drawn: list[Mutant] = []
    while len(drawn) < count and any(places.values()):
        for mutants in places.values():
            if mutants and len(drawn) < count:
                drawn.append(mutants.pop())
    return drawn


class Places:
    """The places of a file that may change."""

    def __init__(self, file: str, text: str):
        self.file = file
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line))

    def mutants(self) -> Iterator[Mutant]:
        yield from self._of(ast.parse(self.text))

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        """Mutants of a node and of all below it."""
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            return
        if isinstance(node, ast.FunctionDef) and node.name in SILENT:
            return
        if isinstance(node, ast.Compare):
            yield from self._of_comparison(node)
        elif isinstance(node, ast.BinOp) and not _joins_strings(node):
            yield from self._of_sign(node.op, node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            yield from self._of_sign(node.op, node.target, node.value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield self._mutant("sign", self._begin(node), "-", "+")
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node)
        elif isinstance(node, ast.Subscript):
            yield from self._of_subscript(node)
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    yield from self._of(child)

    def _of_comparison(self, node: ast.Compare) -> Iterator[Mutant]:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands[:-1], node.ops, operands[1:], strict=True):
            old, new = COMPARISONS[type(operator)]
            yield self._between("comparison", left, right, old, new)

    def _of_sign(self, operator: ast.operator, left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        if type(operator) in SIGNS:
            old, new = SIGNS[type(operator)]
            if isinstance(left, ast.Name) and isinstance(left.ctx, ast.Store):
                old, new = f"{old}=", f"{new}="
            yield self._between("sign", left, right, old, new)

    def _of_constant(self, node: ast.Constant) -> Iterator[Mutant]:
        if isinstance(node.value, str):
            yield from self._of_axis(node)
        else:
            new = other_constant(node.value)
            if new is not None:
                yield self._mutant("constant", self._begin(node), self._source(node), new)

    def _of_axis(self, node: ast.Constant) -> Iterator[Mutant]:
        if node.value in AXES:
            old = self._source(node)
            yield self._mutant("axis name", self._begin(node), old, old.replace(node.value, AXES[node.value]))

    def _of_subscript(self, node: ast.Subscript) -> Iterator[Mutant]:
        """Change the constants of an index and the limits of a slice; `Array[...]` of a type has none of them."""
        yield from self._of(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            limits = [part.lower, part.upper] if isinstance(part, ast.Slice) else [part]
            for limit in filter(None, limits):
                magnitude = limit.operand if isinstance(limit, ast.UnaryOp) else limit
                if isinstance(magnitude, ast.Constant) and type(magnitude.value) is int:
                    yield self._mutant(
                        "index", self._begin(magnitude), self._source(magnitude), str(magnitude.value + 1)
                    )
                else:
                    yield from self._of(limit)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutant:
        """Return the mutant of the operator between two operands. Parentheses and comments may stand there too."""
        begin = self._end(left)
        gap = self.text[begin : self._begin(right)]
        without_comments = re.sub(r"#.*", lambda comment: " " * len(comment[0]), gap)
        pattern = r"\s+".join(re.escape(word) for word in old.split())
        operator = re.search(pattern, without_comments)
        assert operator, f"{self.file}: no {old} in {gap!r}"
        return self._mutant(kind, begin + operator.start(), operator[0], new)

    def _mutant(self, kind: str, start: int, old: str, new: str) -> Mutant:
        line = self.text.count("\n", 0, start) + 1
        return Mutant(kind, self.file, line, start, old, new)

    def _begin(self, node: ast.expr) -> int:
        return self._place(node.lineno, node.col_offset)

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        """Return the characters before a place. Columns of `ast` are bytes."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self.line_starts[line - 1] + len(before)

    def _source(self, node: ast.expr) -> str:
        return self.text[self._begin(node) : self._end(node)]


def other_constant(value: object) -> str | None:
    """Return the source of the constant that replaces a number or a bool; None for all else."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return repr(2 * value or 1.0)
    return None


def _joins_strings(node: ast.BinOp) -> bool:
    return any(_is_string(side) for side in (node.left, node.right))


def _is_string(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _joins_strings(node)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
