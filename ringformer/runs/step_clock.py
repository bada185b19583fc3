"""The moments at which steps end on the devices.

Where a device's program has a loop whose length depends on data, a GPU's host is held while it hands the program over,
until the loop has ended. What the host sees of a step's metrics then comes a step later, and a step would seem to take
the time of another one. So a thread waits for each step.
"""

import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax

HELD_SECONDS = 1.0
"""Seconds of handing a step over from which on the host was held by it."""


class Ending(NamedTuple):
    """A step that was handed to the devices."""

    moment: Future
    """The moment at which it ends, as `time.perf_counter`; or the error that it ends with."""
    held: bool
    """True if the host was held until the step had nearly ended."""


class StepClock:
    """Notes when steps end, without holding the host. Its thread ends with the process."""

    def __init__(self):
        self._watched: SimpleQueue[tuple[Any, Future]] = SimpleQueue()
        self._begun = time.perf_counter()
        threading.Thread(target=self._watch, name="step clock", daemon=True).start()

    def hand_over(self) -> None:
        """Note that a step is about to be handed to the devices."""
        self._begun = time.perf_counter()

    def handed_over(self, metrics: Any) -> Ending:
        """Note that a step was handed over, and watch for its end: that its metrics, a tree of arrays, are computed."""
        ending = Ending(Future(), time.perf_counter() - self._begun >= HELD_SECONDS)
        self._watched.put((metrics, ending.moment))
        return ending

    def _watch(self) -> None:
        while True:
            metrics, moment = self._watched.get()
            try:
                jax.block_until_ready(metrics)
            except Exception as error:
                moment.set_exception(error)
            else:
                moment.set_result(time.perf_counter())
            del metrics  # it holds memory of a device
