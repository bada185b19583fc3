"""A thread that knows what the process is doing, and for how long it may."""

import faulthandler
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

INTERVAL = 1.0
"""Seconds between two looks."""


class Doing(NamedTuple):
    """What is under way."""

    number: int
    """Counts what was begun, alike on all processes: one that is stuck is behind."""
    what: str
    limit: str
    """Which of the limits holds."""


class Watchdog:
    """Looks every second whether something has been under way for longer than its limit, and calls `expired(doing)`.

    Seconds are those in which the process ran: one that was stopped and goes on has not stalled.
    """

    def __init__(self, expired: Callable[[Doing], None]):
        self._expired = expired
        self._limits: dict[str, float] = {}
        self.doing = Doing(0, "the preparation", "none")
        self.seconds = 0.0
        """Those that it has been under way."""
        self.clock = 0.0
        """Seconds that the process has run."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def limit(self, minutes: Mapping[str, float]) -> None:
        """Set how long what is under way may take, in minutes: "startup", "compile" and "step"."""
        self._limits = {name: 60 * value for name, value in minutes.items()}

    def begin(self, what: str, limit: str) -> None:
        """Note what begins; "none" is a limit that never ends."""
        self.doing, self.seconds = Doing(self.doing.number + 1, what, limit), 0.0

    def alive(self) -> None:
        """Note that what is under way has come further."""
        self.begin(self.doing.what, self.doing.limit)

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        self._thread.join()

    def _watch(self):
        last, said = time.monotonic(), -1
        while not self._closing.wait(INTERVAL):
            now = time.monotonic()
            ran, last = min(now - last, 2 * INTERVAL), now
            self.clock += ran
            self.seconds += ran
            doing = self.doing
            if self.seconds > self._limits.get(doing.limit, float("inf")) and said != doing.number:
                said = doing.number
                self._expired(doing)


def dump_stacks(path: Path, why: str) -> None:
    """Append what every Python thread of this process is doing to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
