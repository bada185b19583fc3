"""When a run saves, besides at counted steps: when the clock says so, and when a signal asks it to end."""

import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from ringformer.processes.signals import heeded

STOPPED = 75
"""The exit code after SIGTERM, SIGUSR1 or SIGHUP, EX_TEMPFAIL of sysexits.h: the same command again goes on."""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def said_of(number: int) -> str:
    """What a user calls a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class Terminated(Exception):
    """A signal ended the run; its state is saved."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.code = INTERRUPTED if number == signal.SIGINT else STOPPED
        """What the process should exit with."""


class Stopping:
    """What the training loop asks and tells whoever may end it. Entered, while there is something to save."""

    signal: int | None = None
    """What asks the run to end."""
    run_dir: Path | None = None
    """The folder of the run that is under way."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def due(self) -> bool:
        """Whether to stop here; to be asked at the same places on all processes, after every step."""
        return self.signal is not None

    def doing(self, what: str, limit: str = "step", begun: bool = False) -> None:
        """Hear what is under way, and which of the limits holds for it: "startup", "compile" or "step", or "none". From
        `begun` on there is something to save."""


class Termination(Stopping):
    """While entered, the first of those signals only makes a stop due; another ends the process as ever.

    Only in the main thread of a single process. Of several, each would stop at a step of its own, and wait for the
    others for ever: there signals keep their meaning. (`Supervision`, of the command, can do more.)
    """

    def __init__(self):
        self._possible = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self):
        if self._possible:
            self._before = {number: signal.signal(number, self._request) for number in heeded()}
        return self

    def __exit__(self, *_):
        if self._possible:
            self._restore()

    def _request(self, number, _frame):
        self.signal = number
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)


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
