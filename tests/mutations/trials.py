"""Run many tests in one fork, in a given order, on the package with a mutant or on the true one."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commit import ROOT
from tests.mutations.drawing import Mutant
from tests.mutations.forks import QUIET, in_a_fork, replace_here_and_below
from tests.mutations.nearness import Test

RUNNING = ROOT / "build" / "mutants" / "running.txt"
"""Holds the node id of the test that runs."""

NO_TEST = "before the first test"
"""Stands for a test if pytest or its conftest.py fails."""

PATIENCE = (300.0, 20.0)
"""A fork may take so many seconds, and so many for each CPU-second of its tests, before it counts as hanging."""


class Chosen:
    """Pytest plugin that runs the chosen tests in their order, and keeps the failures."""

    def __init__(self, names: list[str]):
        self.places = {name: place for place, name in enumerate(names)}
        self.failures: dict[str, str] = {}
        self.ran = 0

    def pytest_sessionstart(self, session):
        session.config.pluginmanager.unregister(name="costs")  # the first test imports more than it would in the suite

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        chosen = [item for item in items if item.nodeid in self.places]
        items[:] = sorted(chosen, key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid):
        self.ran += 1
        RUNNING.write_text(nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.keep(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self.keep(report)

    def keep(self, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
        self.failures[report.nodeid] = message[:300]


class Trial(NamedTuple):
    """Results of tests that ran one after the other."""

    failures: dict[str, str]
    """Messages by test. A test in which the process died or passed its time limit has failed."""
    ran: int


def try_tests(tests: list[Test], mutant: Mutant | None, first_failure_ends: bool = True) -> Trial:
    """Run tests in a fork, on the package with the mutant, if there is one."""

    def work(folder: Path) -> dict:
        if mutant:
            path = ROOT / mutant.file
            replace_here_and_below(str(path), mutant.mutated(path.read_text()), folder)
        chosen = Chosen([test.name for test in tests])
        arguments = [*QUIET, "--exitfirst"] if first_failure_ends else QUIET
        modules = dict.fromkeys(test.module for test in tests)
        code = pytest.main([*arguments, *modules], plugins=[chosen])
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            raise RuntimeError("pytest could not begin or go on")
        return {"failures": chosen.failures, "ran": chosen.ran}

    RUNNING.parent.mkdir(parents=True, exist_ok=True)
    RUNNING.write_text(NO_TEST)
    at_least, for_each_second = PATIENCE
    limit = at_least + for_each_second * sum(test.seconds for test in tests)
    answer = in_a_fork(work, limit)
    if answer.value is None:
        reason = "passed the time limit" if answer.stopped else f"died: {answer.output[-300:]}"
        return Trial({RUNNING.read_text(): reason}, 0)
    return Trial(**answer.value)


def failing_on_the_true_package(tests: list[Test]) -> set[str]:
    """Return the names of the tests that fail without any mutant. Raises RuntimeError if pytest cannot begin."""
    failing: set[str] = set()
    left = tests
    while left:
        trial = try_tests(left, None, first_failure_ends=False)
        failing |= set(trial.failures)
        if trial.ran or not trial.failures:
            break
        if NO_TEST in failing:
            raise RuntimeError(f"the true package has no verdict: {trial.failures}")
        left = [test for test in left if test.name not in failing]  # the process died in one: go on without it
    return failing
