"""The language of the package: docstrings begin with a verb or a noun, names say what a thing is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ringformer

ROOT = Path(ringformer.__file__).parent
OPENINGS = {
    "what",
    "whether",
    "of",
    "how",
    "which",
    "who",
    "whoever",
    "whose",
    "where",
    "when",
    "why",
    "those",
    "that",
    "so",
}
"""Words that neither a verb nor a noun is."""
VAGUE = {"said", "told", "found", "known"}
"""Participles that were names of seven kinds of things."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the strings that follow fields and constants."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        for before, statement in zip([None, *body], body, strict=False):
            text = statement.value.value if _is_constant(statement) else None
            if isinstance(text, str) and isinstance(before, ast.Assign | ast.AnnAssign | None):
                yield statement.lineno, text


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that are bound: variables, parameters, attributes, functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def files() -> list[tuple[str, ast.Module]]:
    return [(str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in sorted(ROOT.rglob("*.py"))]


def first_word(text: str) -> str:
    words = text.split()
    return words[0].strip(".,;:!?'\"").lower() if words else ""


def wrong_openings() -> list[str]:
    return [
        f"{name}:{line}: {' '.join(text.split()[:6])}"
        for name, tree in files()
        for line, text in docstrings(tree)
        if first_word(text) in OPENINGS
    ]


def vague_names() -> list[str]:
    return [f"{name}:{line}: {word}" for name, tree in files() for line, word in names(tree) if word in VAGUE]


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert wrong_openings() == []


def test_no_name_is_a_vague_participle():
    assert vague_names() == []


def test_the_check_sees_what_it_should():
    tree = ast.parse('"""What it is."""\nx = 1\n"""Of x."""\ndef f(said):\n    """How."""\n    self.told = 1\n')
    assert [first_word(text) for _, text in docstrings(tree)] == ["what", "of", "how"]
    assert {word for _, word in names(tree)} & VAGUE == {"said", "told"}
