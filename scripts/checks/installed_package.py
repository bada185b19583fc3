"""Check a ringformer that is installed without extras: its version, the README's program, and its modules.

    python -W error scripts/checks/installed_package.py REPOSITORY

Run it outside of the repository, in an environment that has ringformer and its base dependencies alone.
"""

import importlib
import pkgutil
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import ringformer

ROOMS_OF_THE_BASE = ("ringformer.ops", "ringformer.models")
"""Rooms that need no extra, as pyproject.toml promises beside its dependencies."""

PACKAGES_OF_EXTRAS = ("datasets", "pyarrow", "matplotlib", "sentencepiece", "torch")
"""Packages that the base does not install, one or more of each large extra."""

PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def check_version(repository: Path) -> None:
    """Raise RuntimeError if the repository's own sources are imported, or if the version is not the repository's."""
    source = Path(ringformer.__file__)
    if source.is_relative_to(repository / "ringformer"):
        raise RuntimeError(f"{source} is not the installed package: run this program outside of {repository}")
    line = f'version = "{version("ringformer")}"'
    if line not in (repository / "pyproject.toml").read_text():
        raise RuntimeError(f"pyproject.toml has no line beginning with {line}, the version that is installed")


def run_program_of_readme(repository: Path) -> None:
    """Run the first program of the README. Raises RuntimeError if the README has none."""
    programs = PROGRAM.findall((repository / "README.md").read_text())
    if not programs:
        raise RuntimeError("the README shows no Python program: its first one has to use the op")
    exec(compile(programs[0], "README.md", "exec"), {})


def import_modules(room: str) -> list[str]:
    """Import every module of a room, and return their names. Raises ImportError if one needs more than the base."""
    package = importlib.import_module(room)
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{room}.")]
    for name in names:
        importlib.import_module(name)
    return names


def check_environment() -> None:
    """Raise RuntimeError if the environment has packages of an extra, because then the base was not tested alone."""
    present = [name for name in PACKAGES_OF_EXTRAS if find_spec(name)]
    if present:
        raise RuntimeError(f"the base installed {present}, which belong to extras: see dependencies in pyproject.toml")


def main() -> None:
    repository = Path(sys.argv[1]).resolve()
    check_version(repository)
    check_environment()
    run_program_of_readme(repository)
    for room in ROOMS_OF_THE_BASE:
        print(f"{room}: {len(import_modules(room))} modules need the base alone")


if __name__ == "__main__":
    main()
