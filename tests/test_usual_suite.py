"""The plugin of the usual suite, in toy suites: slow cells, tests that cost too much, mutations, measured costs."""

import pytest

from tests import usual_suite
from tests.mutations.mutations import Mutation

pytest_plugins = ["pytester"]

INI = """
[pytest]
markers =
    slow: slow
    results: results
    usual: the usual cells
"""

CELLS = """
import pytest

@pytest.mark.usual({named})
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_layouts(layout):
    pass
"""

TWO_TESTS = """
import pytest

def test_works():
    sum(range(100_000))

@pytest.mark.slow
def test_works_longer():
    sum(range(100_000))
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """`run(source, *arguments, **constants)`: pytest on a test file `test_toy.py`, with the plugin.

    The plugin has these constants only meanwhile, since it measures the tests of this file too.
    """
    pytester.makeini(INI)

    def run(source, *arguments, **constants):
        pytester.makepyfile(test_toy=source)
        with monkeypatch.context() as patch:
            for name, value in {"MUTATIONS": [], **constants}.items():
                patch.setattr(usual_suite, name, value)
            return pytester.runpytest_inprocess("-p", "tests.usual_suite", "-p", "no:cacheprovider", *arguments)

    return run


def test_cells_without_a_name_are_slow(run):
    source = CELLS.format(named='"zigzag", "striped"')
    run(source, "-m", "not slow").assert_outcomes(passed=2, deselected=1)
    run(source, "-m", "slow").assert_outcomes(passed=1, deselected=2)
    run(source).assert_outcomes(passed=3)


def test_a_name_of_no_cell_is_refused(run):
    result = run(CELLS.format(named='"zigzag", "zigzig"'))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "test_toy.py::test_layouts has no cells ['zigzig'], which its mark `usual` names" in result.stderr.str()


def test_a_run_of_some_cells_does_not_miss_the_others(run):
    source = CELLS.format(named='"zigzag", "striped"')
    run(source, "test_toy.py::test_layouts[zigzag]").assert_outcomes(passed=1)


def test_a_usual_test_above_the_limit_fails(run):
    result = run(TWO_TESTS, MOST_SECONDS=0.0)
    result.assert_outcomes(passed=1, failed=1)
    message = "*test_toy.py::test_works took * CPU-seconds on a machine that takes *; a usual test may take 0 there: *"
    result.stdout.fnmatch_lines([message])


def test_a_test_that_runs_alone_has_no_limit(run):
    run(TWO_TESTS, "test_toy.py::test_works", MOST_SECONDS=0.0).assert_outcomes(passed=1)
    run(TWO_TESTS, "-k", "works", MOST_SECONDS=0.0).assert_outcomes(passed=2)


def test_a_slow_machine_has_more_time(run):
    """The limit is that of the reference machine: where its work takes longer, so may a test."""
    spins = """
import time

def test_spins():
    begun = time.process_time()
    while time.process_time() - begun < 0.3:
        pass
"""
    run(spins, MOST_SECONDS=0.2, REFERENCE_SECONDS=1.0).assert_outcomes(failed=1)
    run(spins, MOST_SECONDS=0.2, REFERENCE_SECONDS=0.01).assert_outcomes(passed=1)


def test_a_listed_test_may_take_more(run):
    dear = {"test_toy.py::test_works": "it sums"}
    run(TWO_TESTS, MOST_SECONDS=0.0, DEAR=dear).assert_outcomes(passed=2)


def test_measured_seconds_are_printed(run):
    result = run(TWO_TESTS, "--measure")
    result.stdout.fnmatch_lines(["*CPU-seconds, with the processes that tests start*", "* test_toy.py::test_works*"])
    result.stdout.fnmatch_lines(["* all 2 tests", "* CPU-seconds here for one of the reference machine"])
    assert "CPU-seconds" not in run(TWO_TESTS).stdout.str()


def test_tests_of_committed_results_are_summed_apart(run):
    """The budget is that of the other tests."""
    result = run(TWO_TESTS.replace("mark.slow", "mark.results"), "--measure")
    result.stdout.fnmatch_lines(["* all 1 tests", "* besides, 1 tests of committed results"])


def test_processes_of_a_test_count(run):
    loop = "import time\nwhile time.process_time() < 0.2: pass"
    source = f"""
import subprocess, sys

def test_starts_a_process():
    subprocess.run([sys.executable, "-S", "-c", {loop!r}], check=True)
"""
    result = run(source, "--measure")
    (line,) = (line for line in result.outlines if line.endswith("test_toy.py::test_starts_a_process"))
    assert float(line.split()[0]) >= 0.2


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("test_toy.py::test_is_gone", "mutation 'wrong' names tests/test_toy.py::test_is_gone, which does not exist"),
        ("test_toy.py::test_works_longer", "too many mutations are caught by slow tests alone: ['wrong']"),
    ],
    ids=["gone", "slow"],
)
def test_mutations_name_usual_tests(run, test, message):
    result = run(TWO_TESTS, MUTATIONS=[Mutation("wrong", "a.py", "a", "b", test)])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
