"""A step's time is its own, whether the host waits for the devices or not."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ringformer.runs.step_clock import end_of


class Metrics:
    """Metrics of a step that takes so many seconds on a device."""

    def __init__(self, seconds: float):
        self._computed = threading.Event()
        threading.Timer(seconds, self._computed.set).start()

    def is_ready(self):
        return self._computed.is_set()

    def block_until_ready(self):
        assert self._computed.is_set()
        return self


def test_a_step_ends_when_its_metrics_are_computed():
    """The host does not wait, and looks later, at two steps at once."""
    began = time.perf_counter()
    first, second = end_of({"loss": Metrics(0.1)}), end_of({"loss": Metrics(0.2)})
    assert time.perf_counter() - began < 0.09
    time.sleep(0.4)
    assert first.result() - began == pytest.approx(0.1, abs=0.08)
    assert 0.02 < second.result() - first.result() < 0.2


def test_a_step_that_fails_has_no_end_but_its_error():
    def block_until_ready():
        raise RuntimeError("out of memory")

    ended = end_of(SimpleNamespace(block_until_ready=block_until_ready, is_ready=lambda: True))
    with pytest.raises(RuntimeError, match="out of memory"):
        ended.result(10)


def test_a_process_may_end_during_a_step():
    """With its own exit code: a thread that waits within the runtime would abort it."""
    script = """
import sys, jax, jax.numpy as jnp
from ringformer.runs.step_clock import end_of
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda i, y: jnp.sin(y @ y), x))
end_of({"loss": slow(jnp.ones((300, 300)))})
sys.exit(7)
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (7, "")
