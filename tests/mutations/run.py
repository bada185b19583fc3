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
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.commit import ROOT, revision
from tests.mutations.forks import QUIET, in_a_fork, replace_here_and_below
from tests.mutations.mutations import MUTATIONS, Mutation

SHOWN = 2_000
"""Characters of an error that are printed: its end says most."""


class Outcome(NamedTuple):
    """Result of some tests."""

    passed: int
    failed: int
    """By what the test itself asserts: another exception, or a process that dies, is no failure and raises."""
    seconds: float
    text: str


class Results:
    """Pytest plugin that counts the tests that pass, and keeps the messages of the others."""

    def __init__(self):
        self.passed = 0
        self.failures: list[str] = []
        self.others: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed += 1
        elif report.when == "call" and report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures.append(crash.message if crash else str(report.longrepr))
        elif not report.passed:
            self.others.append(f"{report.nodeid} was {report.outcome} in its {report.when}")

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

    def work(folder: Path) -> dict:
        if mutation and text:
            replace_here_and_below(str(ROOT / "ringformer" / mutation.file), text, folder)
        return _run_pytest(tests)

    begun = time.perf_counter()
    answer = in_a_fork(work)
    seconds = time.perf_counter() - begun
    if answer.value is None:
        raise RuntimeError(f"the tests {tests} could not be run:\n{answer.output}")
    passed, failures, others = (answer.value[key] for key in ("passed", "failures", "others"))
    ran = passed + len(failures)
    # A NameError is no verdict on the arithmetic: what a test asserts must have failed.
    asserted = all(message.startswith(("AssertionError", "assert ", "Failed: ")) for message in failures)
    if others or ran != len(tests) or not asserted:
        raise RuntimeError(f"the tests {tests} could not be run:\n{others}\n{answer.output}")
    return Outcome(passed, len(failures), seconds, answer.output)


def _run_pytest(tests: list[str]) -> dict:
    """Run tests in this process, and return the number that passed and the messages of the others."""
    os.environ["JAXTYPING_DISABLE"] = "1"  # a wrong dtype must fail what the test asserts, not the signature
    import_module("jaxtyping").config.update("jaxtyping_disable", True)
    results = Results()
    import_module("pytest").main([*QUIET, *(f"tests/{test}" for test in tests)], plugins=[results])
    return {"passed": results.passed, "failures": results.failures, "others": results.others}


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


def changed_since(revision: str) -> set[str]:
    """Paths from the repository's root that differ from a revision, committed or not."""
    git = subprocess.run(["git", "diff", "--name-only", revision], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(git.stdout.split())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--since", metavar="REVISION", type=revision, help="only mutations whose file or test has changed since"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only mutations whose name has this text")
    args = parser.parse_args(words)
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.name]
    if not chosen:
        parser.exit(2, f"no mutation has {args.only!r} in its name; names: grep ^@@ tests/mutations/mutations.diff\n")
    if args.since:
        changed = changed_since(args.since)
        chosen = [m for m in chosen if f"ringformer/{m.file}" in changed or f"tests/{m.test.split('::')[0]}" in changed]
    survived = []
    for number, mutation in enumerate(chosen, 1):
        try:
            outcome = try_tests([mutation.test], mutation)
        except (RuntimeError, ValueError) as error:
            verdict = "NOT TRIED"
            details = str(error)[-SHOWN:]
        else:
            verdict = "caught" if outcome.failed else "SURVIVED"
            details = f"{outcome.seconds:.0f} s"
        if verdict != "caught":
            survived.append(mutation)
        print(f"{number:4} of {len(chosen)}  {verdict}: {mutation.name}, by {mutation.test}, {details}", flush=True)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations are caught by the test that they name")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
