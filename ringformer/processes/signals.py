"""Signals that a thread handles at once, whatever the main thread is doing.

Python runs signal handlers in the main thread, between two of its own instructions: never during a compilation or while
it waits for a device. If a handler raises KeyboardInterrupt inside an import or a library's callback, the exception is
printed there and lost.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that end a run: a scheduler's SIGTERM, SLURM's --signal=USR1, Ctrl-C, a closed terminal."""


Handler = Callable[[int, Any], Any]
"""Handler of a signal: it takes the number and the frame."""


def heeded() -> list[int]:
    """Return SIGNALS, without SIGHUP if it is ignored, as under nohup.

    SIGINT is always included: a shell ignores it for background jobs, but a user who sends it to one means it.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


def handle_signals(handler: Handler) -> dict[int, Any]:
    """Install a handler of the signals of `heeded()`; return their previous handlers, by signal."""
    before = {}
    for number in heeded():
        before[number] = signal.signal(number, handler)
    return before


def restore_handlers(before: dict[int, Any]) -> None:
    """Install the handlers that `handle_signals` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


class SignalThread:
    """Context manager that calls `heard(number)` in a separate thread for each signal of `heeded()`, and suppresses the
    signal's usual effect. `heard` may be replaced. Only the main thread may enter the context.
    """

    def __init__(self, heard: Callable[[int], None]):
        self.heard = heard

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = handle_signals(lambda *_: None)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before)
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _listen(self) -> None:
        while came := os.read(self._read, 64):
            for number in came:
                if number in SIGNALS:
                    self.heard(number)
