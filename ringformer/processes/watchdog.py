"""Watchdog: a thread that notices when the process exceeds a time limit."""

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

INTERVAL = 1.0
"""Seconds between two checks."""


class Doing(NamedTuple):
    """Current activity of the process."""

    number: int
    """Number of activities begun. All processes begin the same ones, so a process that is stuck has a lower number."""
    what: str
    limit: str
    """Name of the time limit that applies."""


class Watchdog:
    """Thread that checks every second whether the current activity exceeds its limit; if so, it calls `expired(doing)`
    once.

    Only seconds in which the process ran count: a process that was stopped and continued has not stalled.
    """

    each_second: Callable[[], None] | None = None
    """Another check, which the same thread runs every second."""

    def __init__(self, expired: Callable[[Doing], None]):
        self._expired = expired
        self.limits: dict[str, float] = {}
        """Seconds allowed for an activity, by the name of its limit; other names have no limit."""
        self.doing: Doing = Doing(0, "the preparation", "none")
        self.seconds: float = 0.0
        """Seconds since the activity began."""
        self.clock: float = 0.0
        """Seconds for which the process has run."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: str, limit: str) -> None:
        """Record the activity that begins, and the name of its limit."""
        self.doing = Doing(self.doing.number + 1, what, limit)
        self.seconds = 0.0

    def alive(self) -> None:
        """Restart the clock of the current activity: it has made progress."""
        self.begin(self.doing.what, self.doing.limit)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        reported = -1
        while not self._closing.wait(INTERVAL):
            now = time.monotonic()
            ran = min(now - last, 2 * INTERVAL)
            last = now
            self.clock += ran
            self.seconds += ran
            doing = self.doing
            if self.seconds > self.limits.get(doing.limit, float("inf")) and reported != doing.number:
                reported = doing.number
                self._expired(doing)
            if self.each_second is not None:
                self.each_second()


def dump_stacks(path: Path, why: str) -> None:
    """Append the stack of every Python thread of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
