"""Try tests on a mutated package: they must fail there, and pass on the true one.

    python -m tests.mutations.run                      all mutations of the list
    python -m tests.mutations.run --since origin/main  those whose file or test has changed since

A mutated file is never written. A process that has imported the libraries, but not ringformer, forks for each mutation.
In the child, Python's loader reads the mutated text instead of the file. Python processes that a test starts do the
same (`startup/sitecustomize.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.commit import ROOT
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.startup.replaced_file import VARIABLE, replace_file

STARTUP = Path(__file__).parent / "startup"

LIBRARIES = (
    "jax",
    "jax.numpy",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "pytest",
    "ml_collections",
    "jaxtyping",
    "beartype",
)
"""Imported once, before the forks. None of them starts a thread or a backend on import."""


class Outcome(NamedTuple):
    """What became of some tests."""

    passed: int
    failed: int
    """By what the test itself asserts: another exception, or a process that dies, is no failure and raises."""
    seconds: float
    text: str


class Results:
    """Pytest plugin that keeps what became of each test."""

    def __init__(self):
        self.passed = 0
        self.failures: list[str] = []
        self.others: list[str] = []
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed += 1
        elif report.when == "call" and report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures.append(crash.message if crash else str(report.longrepr))
        elif not report.passed:
            self.others.append(f"{report.nodeid} was {report.outcome} in its {report.when}")
        if report.failed:
            self.texts.append(report.longreprtext)

    def pytest_collectreport(self, report):
        if report.failed:
            self.others.append(report.longreprtext)


def mutated_text(mutation: Mutation) -> str:
    """The file's text with the mutation. Raises ValueError if `old` is not there exactly once."""
    text = (ROOT / "ringformer" / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: {mutation.old!r} occurs {text.count(mutation.old)} times in "
            f"ringformer/{mutation.file}, not once: mend the patch"
        )
    return text.replace(mutation.old, mutation.new)


def try_tests(tests: list[str], mutation: Mutation | None = None) -> Outcome:
    """Run tests in a fork, on the package with the mutation, if there is one.

    Raises ValueError if the patch does not apply exactly once, RuntimeError if the tests could not be run.
    """
    text = mutated_text(mutation) if mutation else None
    replaced = {"path": str(ROOT / "ringformer" / mutation.file), "text": text} if mutation else None
    begun = time.perf_counter()
    result = _in_a_fork(tests, replaced)
    seconds = time.perf_counter() - begun
    ran = result["passed"] + len(result["failures"])
    # A NameError is no verdict on the arithmetic: what a test asserts must have failed.
    asserted = all(message.startswith(("AssertionError", "assert ", "Failed: ")) for message in result["failures"])
    if result["others"] or ran != len(tests) or not asserted:
        raise RuntimeError(f"the tests {tests} could not be run:\n{result['others']}\n{result['output']}")
    return Outcome(result["passed"], len(result["failures"]), seconds, result["output"])


def try_apart(tests: list[str], mutation: Mutation | None = None) -> Outcome:
    """`try_tests` in a process of its own: for a caller that has imported ringformer already, as a test has."""
    program = """
import json, sys
from tests.mutations.run import Mutation, try_tests
tests, fields = json.loads(sys.argv[1])
print(json.dumps(try_tests(tests, Mutation(*fields) if fields else None)))
"""
    command = [sys.executable, "-c", program, json.dumps([tests, mutation])]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr)
    return Outcome(*json.loads(process.stdout.splitlines()[-1]))


def _in_a_fork(tests: list[str], replaced: dict | None) -> dict:
    """What a child process made of the tests."""
    for library in LIBRARIES:
        import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output.txt"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _run_and_exit(tests, replaced, answer, output)
        os.waitpid(child, 0)
        text = output.read_text(errors="replace") if output.exists() else ""
        if not answer.exists():
            raise RuntimeError(f"the tests {tests} could not be run:\n{text}")
        return json.loads(answer.read_text()) | {"output": text}


def _run_and_exit(tests: list[str], replaced: dict | None, answer: Path, output: Path):
    """The child: run the tests, write what became of them, and end without the parent's handlers."""
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", closefd=False)
        os.chdir(ROOT)
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        os.environ["JAXTYPING_DISABLE"] = "1"  # a wrong dtype must fail what the test asserts, not the signature
        import_module("jaxtyping").config.update("jaxtyping_disable", True)
        if replaced:
            written = answer.with_name("replaced.json")
            written.write_text(json.dumps(replaced))
            os.environ[VARIABLE] = str(written)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))
            replace_file(replaced["path"], replaced["text"])
        results = Results()
        arguments = [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--tb=short",
        ]
        import_module("pytest").main([*arguments, *(f"tests/{test}" for test in tests)], plugins=[results])
        verdict = {"passed": results.passed, "failures": results.failures, "others": results.others}
        answer.write_text(json.dumps(verdict))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def changed_since(revision: str) -> set[str]:
    """Paths from the repository's root that differ from a revision, committed or not."""
    git = subprocess.run(["git", "diff", "--name-only", revision], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(git.stdout.split())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run", description=__doc__.split("\n\n")[0])
    parser.add_argument("--since", metavar="REVISION", help="only mutations whose file or test has changed since")
    parser.add_argument("--only", metavar="TEXT", default="", help="only mutations whose name has this text")
    args = parser.parse_args(words)
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.name]
    if args.since:
        changed = changed_since(args.since)
        chosen = [m for m in chosen if f"ringformer/{m.file}" in changed or f"tests/{m.test.split('::')[0]}" in changed]
    survived = []
    for number, mutation in enumerate(chosen, 1):
        try:
            outcome = try_tests([mutation.test], mutation)
            verdict = "caught" if outcome.failed else "SURVIVED"
            seconds = f"{outcome.seconds:.0f} s"
        except (RuntimeError, ValueError) as error:
            verdict, seconds = "NOT TRIED", str(error)[-2000:]
        if verdict != "caught":
            survived.append(mutation)
        print(f"{number:4} of {len(chosen)}  {verdict}: {mutation.name}, by {mutation.test}, {seconds}", flush=True)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations are caught by the test that they name")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
