"""Try a test on a mutated copy of the package: it must fail there, and pass on a copy that is only a copy."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.mutations.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]

WITH_THE_COPY = """
import importlib.util, sys, pytest
found = importlib.util.find_spec("ringformer").origin
assert found.startswith(sys.argv[1]), found
sys.exit(pytest.main(sys.argv[2:]))
"""


class Outcome(NamedTuple):
    """What became of some tests."""

    passed: int
    failed: int
    """By what the test itself asserts: another exception, or a process that dies, is no failure and raises."""
    seconds: float
    text: str


def try_tests(tests: list[str], folder: Path, mutation: Mutation | None = None) -> Outcome:
    """Run tests in a process of its own, in `folder`, on a copy of the package with the mutation, if there is one.

    Raises ValueError if the patch does not apply exactly once, RuntimeError if the tests could not be run.
    """
    for name in ("ringformer", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutation:
        apply(mutation, folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # A wrong dtype must fail what the test asserts, and not already the signature.
    environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "JAXTYPING_DISABLE": "1"}
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--junit-xml=junit.xml"]
    begun = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", WITH_THE_COPY, str(folder), *arguments, *(f"tests/{test}" for test in tests)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    seconds, text = time.perf_counter() - begun, process.stdout + process.stderr
    if not (folder / "junit.xml").exists():
        raise RuntimeError(f"the tests {tests} could not be run:\n{text}")
    suite = ElementTree.parse(folder / "junit.xml").find("testsuite").attrib
    ran, failed = int(suite["tests"]), int(suite["failures"])
    failures = [failure.get("message", "") for failure in ElementTree.parse(folder / "junit.xml").iter("failure")]
    # A NameError is no verdict on the arithmetic: what a test asserts must have failed.
    asserted = all(message.startswith(("AssertionError", "assert ", "Failed: ")) for message in failures)
    if (
        int(suite["errors"])
        or int(suite["skipped"])
        or ran != len(tests)
        or process.returncode != (failed > 0)
        or not asserted
    ):
        raise RuntimeError(f"the tests {tests} could not be run:\n{text}")
    return Outcome(ran - failed, failed, seconds, text)


def apply(mutation: Mutation, folder: Path) -> None:
    """Patch the package in `folder`. Raises ValueError if `old` is not there exactly once."""
    path = folder / "ringformer" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: {mutation.old!r} occurs {text.count(mutation.old)} times in "
            f"ringformer/{mutation.file}, not once: mend the patch"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def of_this_commit() -> Mutation:
    """One that the commit's hash chooses; where there is no repository that of the package's files."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if (ROOT / ".git").exists() and git.returncode == 0:
        number = int(git.stdout, 16)
    else:
        files = sorted((ROOT / "ringformer").rglob("*.py"))
        number = int(hashlib.blake2b(b"".join(path.read_bytes() for path in files)).hexdigest(), 16)
    return MUTATIONS[number % len(MUTATIONS)]
