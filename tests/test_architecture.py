"""The house: imports run downward only, and files stay short enough to be one idea each."""

import ast
import re
from pathlib import Path

import ringformer

ROOT = Path(ringformer.__file__).parent
FLOORS = ["untrusted_files", "ops", "device_order", "mesh", "models", "data", "train", "inference", "convert", "estimate", "paper", "cli"]
"""From the ground up: a module imports its own floor and those below. (`data` needs only ops.)"""
PUBLIC = {"__init__"}


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


def modules():
    for path in ROOT.rglob("*.py"):
        name = ".".join(("ringformer", *path.relative_to(ROOT).with_suffix("").parts))
        if name.split(".")[1] not in PUBLIC:
            yield name, path


def test_imports_run_downward():
    upward = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            upward += [
                f"{name} imports {target}"
                for target in names
                if target and target.startswith("ringformer.") and floor(target) > floor(name)
            ]
    assert not upward


def test_every_file_has_its_floor():
    assert {name.split(".")[1] for name, _ in modules()} == set(FLOORS)


def test_no_hint_names_a_package_that_no_index_has():
    """ringformer is installed from a clone: `pip install -e .`."""
    house = ROOT.parent
    files = [p for d in (ROOT, *(house / d for d in ("benchmarks", "configs", "docs", "notebooks", "scripts"))) for p in
             d.rglob("*") if p.suffix in (".py", ".md", ".sh", ".ipynb")]  # fmt: skip
    files += [*house.glob("*.md"), house / "setup.py"]
    hint = re.compile(r"pip install (--?\w+ )*['\"]?ringformer\b(?!/)")
    assert len(files) > 80 and hint.search("pip install -U 'ringformer[tpu]'")
    assert [str(path) for path in files if hint.search(path.read_text())] == []


def test_no_file_is_over_400_lines():
    long = {name: n for name, path in modules() if (n := len(path.read_text().splitlines())) > 400}
    assert not long
