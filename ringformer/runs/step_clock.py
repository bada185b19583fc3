"""The moments at which steps end on the devices.

Where a device's program has a loop whose length depends on data, a GPU's host is held while it hands the program over,
until the loop has ended. What the host sees of a step's metrics then comes a step later, and a step would seem to take
the time of another one. So a thread waits for each step.
"""

import threading
import time
from concurrent.futures import Future
from typing import Any

import jax

HELD_SECONDS = 1.0
"""Seconds of handing a step over from which on the host was held by it."""


def end_of(metrics: Any) -> Future:
    """Return the moment, as `time.perf_counter`, at which the metrics of a step, a tree of arrays, are computed; or the
    error that it ends with. Does not wait: a thread does, which ends with the process."""
    moment: Future = Future()

    def wait() -> None:
        try:
            jax.block_until_ready(metrics)
        except Exception as error:
            moment.set_exception(error)
        else:
            moment.set_result(time.perf_counter())

    threading.Thread(target=wait, name="end of a step", daemon=True).start()
    return moment
