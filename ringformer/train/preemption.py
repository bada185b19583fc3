"""When a run saves, besides at counted steps: when the clock says so, and when SIGTERM asks it to end."""

import signal
import threading
import time

import jax
import numpy as np
from jax.experimental import multihost_utils


class Terminated(Exception):
    """SIGTERM ended the run; its state is saved."""


class Termination:
    """While entered, SIGTERM only sets `requested`; a second one ends the process as ever.

    Only in the main thread of a single process. Of several, each would stop at a step of its own, and wait for the
    others for ever: there the signal keeps its meaning.
    """

    def __init__(self):
        self.requested = False
        self._possible = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self):
        if self._possible:
            self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *_):
        if self._possible:
            signal.signal(signal.SIGTERM, self._before)

    def _request(self, *_):
        self.requested = True
        signal.signal(signal.SIGTERM, self._before)


class SaveClock:
    """Says when `minutes` have passed since the last save, at the same step on all processes; 0: never.

    Process 0 looks at its clock and tells the others, and how many steps to wait before they ask again, those of half
    the time that is left: the devices wait while they agree.
    """

    def __init__(self, minutes: float, step: int):
        self._seconds = 60 * minutes
        self._started, self._first = time.monotonic(), step
        self.saved(step)

    def saved(self, step: int) -> None:
        """Note that the state of `step` was saved."""
        self._saved, self._ask_at = time.monotonic(), step + 1

    def due(self, step: int) -> bool:
        """Whether it is time to save the state of `step`; to be asked at every step."""
        if not self._seconds or step < self._ask_at:
            return False
        now = time.monotonic()
        left = self._seconds - (now - self._saved)
        if jax.process_count() == 1:
            return left <= 0
        pace = (now - self._started) / (step - self._first)
        wait = np.clip(left / 2 / max(pace, 1e-9), 1, np.iinfo(np.int32).max // 2)
        answer = np.array([left <= 0, wait]).astype(np.int32)
        due, wait = multihost_utils.broadcast_one_to_all(answer).tolist()
        self._ask_at = step + wait
        return bool(due)
