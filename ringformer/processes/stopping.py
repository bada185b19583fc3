"""Decision to stop a run, and the phases that a run goes through.

The training loop announces each of its phases, and asks after every step whether to stop. A signal, a preemption
notice, a failure of a host, a stalled phase, a lost process and a closed terminal all reach the loop through one
object, its `Stopping`.
"""

import enum
import signal
import threading
from pathlib import Path
from typing import NamedTuple, Self

import jax

from ringformer.processes.signals import handle_signals, restore_handlers

STOPPED = 75
"""Exit code after SIGTERM, SIGUSR1, SIGHUP or a failure of a host: EX_TEMPFAIL of sysexits.h. The same command resumes
the run from the step that was saved."""

LOST = 76
"""Exit code of a run that lost a process: the process died, stalled, failed to join or could not read its batch. The
same command resumes the run from the latest save."""

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


class StopReason(NamedTuple):
    """Reason for which all processes of a run stop after the same step."""

    why: str
    """Begins the last line of the run: "stopped by SIGTERM"."""
    code: int
    """Exit code."""
    way_on: str = "the same command resumes the run"
    """Ends the last line of the run."""

    @classmethod
    def by_signal(cls, number: int) -> Self:
        """Return the reason of a run that a signal stops."""
        code = INTERRUPTED if number == signal.SIGINT else STOPPED
        return cls(f"stopped by {signal_name(number)}", code)

    def before_first_step(self) -> str:
        """Describe a stop before there is anything to save."""
        return f"{self.why} before the first step: nothing is lost, {self.way_on}"


class Ended(Exception):
    """The run ended early. `code` is the exit code of the process."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code: int = code


class Stopped(Ended):
    """The run ended early, after its state was saved."""


class InputLost(Ended):
    """One of several processes cannot take part in what the others begin: the steps since the last save are lost."""


class Stopping:
    """Object that decides when a run stops; a context that is entered while there is something to save."""

    reason: StopReason | None = None
    """Reason to end the run, once there is one."""
    run_dir: Path | None = None
    """Folder of the current run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def due(self) -> StopReason | None:
        """Return the reason if the run must stop now. All processes ask at the same places, after every step."""
        return self.reason

    def request(self, reason: StopReason) -> None:
        """Have the run stop after a step that is the same on all processes.

        Raises Ended if there are several and nothing by which they could agree on a step.
        """
        if jax.process_count() > 1:
            raise Ended(f"{reason.why}. {reason.way_on.capitalize()} from the latest checkpoint", reason.code)
        self.reason = reason

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
        self.reason = StopReason.by_signal(number)
        restore_handlers(self._before)
