"""Pytest plugin: the usual suite is a budget. It says which cells of a test are slow, and what each test costs.

A test's CPU-seconds are those of its process while it runs, its fixtures included, and of the processes that it started
and waited for. A module's fixtures count for the test that makes them.
"""

import resource
import statistics
import time
from collections import defaultdict

import pytest

from tests.mutations.mutations import MUTATIONS

MOST_SECONDS = 12.0
"""CPU-seconds that a usual test may take on the reference machine, unless `DEAR` lists it."""

REFERENCE_SECONDS = 0.07
"""CPU-seconds of `fixed_work` on the reference machine: two idle cores, on which the budget is measured."""

DEAR = {
    "tests/train/test_distributed.py::test_two_processes_train_as_one_does": "two processes compile a run each",
    "tests/ops/kernels/test_flash_attention.py::test_gradients_of_one_half_of_the_heads_travel_during_the_other": (
        "kernels of a ring of four in the interpreter"
    ),
    "tests/ops/test_windows.py::test_tpu_kernels": "kernels with windows in the interpreter",
    "tests/mutations/test_mutations.py::test_one_of_this_commit_is_caught": (
        "another test with each commit, which has its own limit, with its module's fixtures and the start of a process"
    ),
    "tests/convert/test_adapters.py::test_the_code_of_the_card_loads_them": "its module trains, and exports twice",
    "tests/train/test_loop.py::test_an_interrupted_run_resumes_on_another_mesh": (
        "its module trains a run, which two other programs repeat: 10 CPU-seconds with JAX 0.10, 13 with 0.12"
    ),
    "tests/convert/test_model_card.py::test_metadata_and_licence_are_those_of_the_base": "its module trains three runs",
}
"""Usual tests that may take more, each with its reason."""

SHOWN = 20
"""Dearest tests that `--measure` prints."""


def cpu_seconds() -> float:
    """CPU-seconds of this process and of all processes that it has waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def fixed_work() -> None:
    """Sort and count words: the same work on every machine."""
    words = sorted(str(number * 7919 % 1_000_003) for number in range(200_000))
    counts: dict[str, int] = defaultdict(int)
    for word in words:
        counts[word[:4]] += 1


def slowness() -> float:
    """Return how many CPU-seconds this machine takes at present for one of the reference machine, at least 1.

    A busy or throttled machine takes up to twice the CPU-seconds: one test took 8.4 and 12.9 on two machines.
    """
    samples = []
    for _ in range(5):
        begun = time.process_time()
        fixed_work()
        samples.append(time.process_time() - begun)
    return max(1.0, statistics.median(samples) / REFERENCE_SECONDS)


def pytest_addoption(parser):
    parser.addoption("--measure", action="store_true", help="print the CPU-seconds of the tests, and the dearest ones")


def pytest_configure(config):
    config.pluginmanager.register(Costs(config), "costs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the cells that `@pytest.mark.usual` does not name as slow, before `-m` selects.

    Raises UsageError if the mark names a cell that does not exist.
    """
    cells = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("usual")
        if mark is None:
            continue
        cell = item.callspec.id
        function = item.nodeid.split("[")[0]
        cells[function, mark.args].append(cell)
        if cell not in mark.args:
            item.add_marker(pytest.mark.slow)
    if not collects_everything(config):
        return
    check_mutations(items)
    for (function, named), existing in cells.items():
        unknown = set(named) - set(existing)
        if unknown:
            raise pytest.UsageError(f"{function} has no cells {sorted(unknown)}, which its mark `usual` names")


MOST_SLOW_MUTATIONS = 0.02
"""Share of the listed mutations whose test may be slow."""


def check_mutations(items) -> None:
    """Raise UsageError if a mutation names a test that does not exist, or if too many name slow tests."""
    by_name = {item.nodeid.removeprefix("tests/"): item for item in items}
    slow = []
    for mutation in MUTATIONS:
        if mutation.test not in by_name:
            raise pytest.UsageError(f"mutation {mutation.name!r} names tests/{mutation.test}, which does not exist")
        if by_name[mutation.test].get_closest_marker("slow"):
            slow.append(mutation.name)
    if len(slow) > MOST_SLOW_MUTATIONS * len(MUTATIONS):
        raise pytest.UsageError(f"too many mutations are caught by slow tests alone: {slow}")


def collects_everything(config) -> bool:
    """Return whether this run collects the whole suite; `-m` selects afterwards."""
    return not config.option.file_or_dir and not config.option.keyword


def is_limited(item) -> bool:
    """Return whether `MOST_SECONDS` holds for this test. It holds in runs of the whole suite: a test that runs alone
    compiles what others compile before it there."""
    is_usual = not any(item.get_closest_marker(name) for name in ("slow", "gpu", "results"))
    is_listed = item.nodeid.split("[")[0] in DEAR
    return is_usual and not is_listed and collects_everything(item.config)


class Costs:
    """Measures every test, fails the dear ones, and prints the sum."""

    def __init__(self, config):
        self.config = config
        self.begun = cpu_seconds()
        self.seconds: dict[str, float] = defaultdict(float)
        self.of_results: set[str] = set()
        self.of_this_test = 0.0
        self.outside_tests: list[float] = []

    def pytest_runtest_logstart(self):
        self.begun = cpu_seconds()
        self.of_this_test = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - self.begun
        self.of_this_test += report.cpu_seconds
        self.begun = now
        if call.when == "call" and report.passed and is_limited(item) and self.of_this_test > MOST_SECONDS:
            slow_by = slowness()
            if self.of_this_test > MOST_SECONDS * slow_by:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {self.of_this_test:.1f} CPU-seconds on a machine that takes {slow_by:.1f} for "
                    f"one of the reference machine; a usual test may take {MOST_SECONDS:.0f} there: make it smaller, "
                    "mark it as slow, name its usual cells (@pytest.mark.usual), or list it in DEAR of "
                    "tests/usual_suite.py"
                )
            self.begun = cpu_seconds()
        return report

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)  # a worker that died measured nothing
        if "results" in report.keywords:
            self.of_results.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["outside_tests"] = cpu_seconds() - sum(self.seconds.values())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.outside_tests.append(getattr(node, "workeroutput", {}).get("outside_tests", 0.0))

    def pytest_terminal_summary(self, terminalreporter):
        if not self.config.getoption("measure"):
            return
        dearest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        terminalreporter.section("CPU-seconds, with the processes that tests start")
        for test in dearest[:SHOWN]:
            terminalreporter.write_line(f"{self.seconds[test]:8.1f}  {test}")
        of_results = sum(self.seconds[test] for test in self.of_results)
        others = len(dearest) - len(self.of_results)
        terminalreporter.write_line(f"{sum(self.seconds.values()) - of_results:8.1f}  all {others:,} tests")
        if self.of_results:
            results = f"{len(self.of_results):,} tests of committed results"
            terminalreporter.write_line(f"{of_results:8.1f}  besides, {results}")
        if self.outside_tests:
            terminalreporter.write_line(f"{sum(self.outside_tests):8.1f}  start and collection of the workers")
        terminalreporter.write_line(f"{slowness():8.2f}  CPU-seconds here for one of the reference machine")
