"""A step's time is its own, whether the host waits for the devices or not, and its line comes when it ends."""

import threading
import time
from types import SimpleNamespace

import pytest

from ringformer.runs import step_clock
from ringformer.runs.step_clock import StepClock


class Metrics:
    """Metrics of a step that takes so many seconds on a device."""

    def __init__(self, seconds: float):
        self._computed = threading.Event()
        threading.Timer(seconds, self._computed.set).start()

    def block_until_ready(self):
        assert self._computed.wait(10)
        return self


def test_a_step_ends_when_its_metrics_are_computed():
    """The host does not wait, and looks later."""
    clock = StepClock()
    begun = time.perf_counter()
    clock.hand_over()
    ending = clock.handed_over({"loss": Metrics(0.1)})
    assert time.perf_counter() - begun < 0.09 and not ending.held
    time.sleep(0.3)
    assert ending.moment.result() - begun == pytest.approx(0.1, abs=0.08)


def test_a_host_that_is_held_is_noticed(monkeypatch):
    monkeypatch.setattr(step_clock, "HELD_SECONDS", 0.05)
    clock = StepClock()
    clock.hand_over()
    time.sleep(0.06)
    assert clock.handed_over({"loss": Metrics(0)}).held
    clock.hand_over()
    assert not clock.handed_over({"loss": Metrics(0)}).held


def test_the_error_of_a_step_is_that_of_its_moment():
    def block_until_ready():
        raise RuntimeError("out of memory")

    clock = StepClock()
    clock.hand_over()
    ending = clock.handed_over(SimpleNamespace(block_until_ready=block_until_ready))
    with pytest.raises(RuntimeError, match="out of memory"):
        ending.moment.result(10)
