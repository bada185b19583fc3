"""Decision to stop a run, and the phases that a run goes through.

The training loop announces each of its phases, and asks after every step whether to stop. A signal, a preemption
notice, a stalled phase, a lost process and a closed terminal all reach the loop through one object, its `Stopping`.
"""

import enum
import signal
import threading
from pathlib import Path
from typing import Self

import jax

from ringformer.processes.signals import handle_signals, restore_handlers

STOPPED = 75
"""Exit code after SIGTERM, SIGUSR1 or SIGHUP: EX_TEMPFAIL of sysexits.h. The same command resumes the run."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

FAILED = 1
"""Exit code of a run that failed, and would fail again."""


class Phase(enum.Enum):
    """Phase of a run: a description, with a placeholder for the step, and the name of the time limit that applies.

    Limits are "startup", "compile" and "step" (`Config.startup_minutes` etc.), or "none".
    """

    STARTUP = "the start-up", "startup"
    COMPILATION = "the compilation of step {}", "compile"
    BATCH = "the batch of step {}", "step"
    FIRST_STEP = "step {}", "compile"  # other processes may still be compiling it
    STEP = "step {}", "step"
    EVALUATION = "the evaluation of step {}", "compile"
    STORE_CHECK = "the save of step {}, and the check of the stores before it", "none"
    SAVE = "the save of step {}", "startup"
    LAST_SAVE = "the end of the last save", "startup"
    EXIT = "the end", "none"


def signal_name(number: int) -> str:
    """Return a signal's name as users write it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def exit_code(number: int) -> int:
    """Return the exit code of a run that this signal stopped."""
    return INTERRUPTED if number == signal.SIGINT else STOPPED


class Stopped(Exception):
    """The run ended early, after its state was saved. `code` is the exit code of the process."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code: int = code


class Terminated(Stopped):
    """A signal ended the run, after its state was saved."""

    def __init__(self, message: str, number: int):
        super().__init__(message, exit_code(number))


class Stopping:
    """Object that decides when a run stops; a context that is entered while there is something to save."""

    signal: int | None = None
    """Signal that asks the run to end."""
    run_dir: Path | None = None
    """Folder of the current run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def due(self) -> bool:
        """Return True if the run must stop now. All processes ask at the same places, after every step."""
        return self.signal is not None

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase, which lasts until the next one begins. From `FIRST_STEP` on there is something to save."""


class Termination(Stopping):
    """Stops a single process at the first of `SIGNALS`; the next one ends the process as usual.

    It works only in the main thread of a single process. Several processes would each stop at a different step and wait
    for one another forever, so for them signals keep their usual effect. (The command's `Supervisor` handles several
    processes.)
    """

    def __init__(self) -> None:
        self._possible = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._possible:
            self._before = handle_signals(self._request)
        return self

    def __exit__(self, *_: object) -> None:
        if self._possible:
            restore_handlers(self._before)

    def _request(self, number, _frame):
        self.signal: int | None = number
        restore_handlers(self._before)
