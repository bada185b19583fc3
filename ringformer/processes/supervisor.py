"""Supervision of the command `ringformer train`: signals, stalls and lost processes.

Until the first step of a run begins, there is nothing to lose, and a signal ends the process at once, whatever it is
doing. From then on, a signal, or a failure of a host that can still run steps, makes the run stop after a step, which
is the same on all processes. They agree on this step as in JAX's preemption service: each process reports its progress,
and all stop one step after the one that is furthest ahead. JAX's service itself does not suffice: it handles only
SIGTERM, hides the signal from all other code, and reports it only at the next step.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple, Self

import jax

from ringformer.cli.visible_text import visible
from ringformer.processes.peers import Peers, Verdict, lost, silent_limit
from ringformer.processes.rendezvous import Membership, ProcessesMissing, known_places, meet, start_jax
from ringformer.processes.signals import SignalThread
from ringformer.processes.stderr import divert_native_stderr, divert_native_stdout, on_abort
from ringformer.processes.stopping import INTERRUPTED, LOST, Ended, Phase, Stopped, Stopping, StopReason
from ringformer.processes.watchdog import Doing, Watchdog, dump_stacks

_ALONE = Membership("", 1, 0)
_LAST_WORDS = 3.0
"""Seconds that process 0, which hosts the store, stays after its verdict, so that the others can read the verdict."""

_CLOSING_SECONDS = 10.0
_UNREACHED = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "Connection", "connection")
"""Words in JAX's errors that indicate a network fault, or a machine that is too busy to answer. Another start may
succeed."""

_TIMED = (Phase.STARTUP, Phase.COMPILATION, Phase.EVALUATION, Phase.STORE_CHECK, Phase.SAVE)
"""Phases whose end is reported with their seconds, if they lasted at least `_WORTH_A_LINE`. The others are parts of a
step."""

_WORTH_A_LINE = 1.0

_SERVICE_LOST = b"JAX distributed service detected fatal errors"


class State(NamedTuple):
    """Progress of a process, exchanged when the processes agree where to stop."""

    session: int
    """Number of runs that this process has started; a config with stages has several."""
    asks: int
    """Number of times that the run has asked whether to stop."""
    phase: str
    """Phase: "between" runs, "starting" one, or "training" from its first step until its last save is written."""


class Supervisor(Stopping):
    """Supervisor of the process: ends it on signals, stalls and lost processes, and reports the reason. It handles
    `signals` from its creation on."""

    def __init__(self, signals: SignalThread):
        self._lock = threading.RLock()
        self._member = _ALONE
        self.first: bool = True
        """True if this process reports for all."""
        self._peers: Peers | None = None
        self._log = Path("logs", "process-0.txt")
        self._session = 0
        self._asks = 0
        self._phase = "between"
        self._signal: int | None = None
        self._stop_at: int | None = None
        self._verdict: Verdict | None = None
        self._leaving = False
        self._timed = True  # of the current phase; the preparation is the first
        self._since = time.monotonic()
        self.watchdog: Watchdog = Watchdog(self._expired)
        signals.heard = self._heard

    def join(self, member: Membership, seconds: float, folder: Path) -> None:
        """Join the other processes of a run, before JAX has a device. C++ then writes to `folder`/logs.

        Raises ProcessesMissing, ValueError or OSError, as `meet` does.
        """
        self._member = member
        self.first = member.index == 0
        meet(member, seconds, known_places)
        self._log = folder / "logs" / f"process-{member.index}.txt"
        prefix = f"[{member.index}] " if member.index else ""
        divert_native_stderr(self._log, prefix)
        divert_native_stdout(self._log)
        self._log_begin = self._log.stat().st_size
        on_abort(self._aborted)
        start_jax(member, seconds)
        from jax._src.distributed import global_state  # the client has no public name

        if member.count > 1:
            client = global_state.client
            self._peers = Peers(client, member, self.watchdog, self._judged, self._stop_together)
            self.watchdog.each_second = self._check_store

    def __enter__(self) -> Self:
        with self._lock:  # not while the processes agree on where to stop: who left now would keep the others waiting
            decided = self._peers is None or self._stop_at is not None
            if self.reason is not None and decided:
                raise Stopped(self.reason.before_first_step(), self.reason.code)
            self._session = self._session + 1
            self._asks = 0
            self._phase = "starting"
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = "between"

    def due(self) -> StopReason | None:
        self.watchdog.alive()
        if self._peers is None:
            return self.reason
        with self._lock:  # not while the processes agree on where to stop
            self._asks += 1
            agreed = self._stop_at is not None and self._asks >= self._stop_at
            return self.reason if agreed else None

    def request(self, reason: StopReason) -> None:
        if self._peers is None:
            self.reason = self.reason or reason
        elif self._peers.request is None:
            self._peers.request = reason

    def enter(self, phase: Phase, step: int | None = None) -> None:
        if phase in (Phase.FIRST_STEP, Phase.STEP):
            self._phase = "training"
        description, limit = phase.value
        begun = description.format(step)
        lasted = time.monotonic() - self._since
        line = []
        if self._timed and lasted >= _WORTH_A_LINE:
            line.append(f"{self.watchdog.doing.what} took {lasted:,.0f} s")
        if phase is Phase.COMPILATION:
            line.append(f"{begun} begins")
        if line and self.first:
            print("; ".join(line), file=sys.stderr, flush=True)
        self._timed = phase in _TIMED
        self._since = time.monotonic()
        self.watchdog.begin(begun, limit)

    def failed(self, error: Exception) -> None:
        """Report this process's error to the user and to the other processes, and end. If there is only one process, do
        nothing."""
        if self._member.count == 1:
            return
        if isinstance(error, ProcessesMissing):
            self._end(str(error), LOST)
        collective = isinstance(error, jax.errors.JaxRuntimeError)
        unreached = collective and any(sign in str(error) for sign in _UNREACHED)
        if collective:
            # Collectives fail in processes that wait for a lost process: the verdict will name it.
            self._note(traceback.format_exc())
            if self._peers is not None:
                self._peers.broken = unreached
            time.sleep(silent_limit("step") + 4 * _LAST_WORDS)
        why = str(error)
        if not isinstance(error, ValueError | OSError | FloatingPointError | ImportError | Ended):
            traceback.print_exc()
            first_line, _, _ = why.partition("\n")
            why = f"{type(error).__name__}: {first_line}"
        code = 1
        if isinstance(error, ValueError | FileNotFoundError | ImportError):
            code = 2
        elif unreached:
            code = LOST
        elif isinstance(error, Ended):
            code = error.code
        self._leaving = True
        if self._peers is not None:
            try:
                self._peers.left(why, code)
            except RuntimeError as silent:
                self._note(str(silent))
        self._end(why, code)

    def close(self) -> None:
        """Wait for the other processes after the last save, and leave together with them."""
        if self._peers is not None:
            self.enter(Phase.EXIT)
            self._peers.close()
            self._peers = None
            jax.distributed.shutdown()
        self.watchdog.close()

    # Signals

    def _heard(self, number: int) -> None:
        """Handle a signal, in the thread of signals."""
        if self._signal is not None:
            if number == signal.SIGINT == self._signal:
                self._end("interrupted twice: steps since the last save are lost", INTERRUPTED)
            return
        self._signal = number
        reason = StopReason.by_signal(number)
        if self._peers is None and self._phase != "training":
            self._end(reason.before_first_step(), reason.code)
        self.request(reason)

    def _stop_together(self, reason: StopReason) -> None:
        """Agree with the other processes on the step after which to stop. All processes call this at about the same
        time."""
        assert self._peers is not None
        self.reason = reason
        with self._lock:
            try:
                progress = State(self._session, self._asks, self._phase)
                states = [State(*state) for state in self._peers.gather(progress)]
            except RuntimeError as error:  # a process is lost: a verdict will follow
                return self._note(str(error))
            last = max(state.session for state in states)
            furthest = [state for state in states if state.session == last]
            self._stop_at = max(state.asks for state in furthest) + 1
            starting = any(state.phase == "starting" for state in furthest)
            at_once = starting or all(state.phase == "between" for state in states)
            closing = any(state.phase == "training" and state.session < last for state in states)
            if not at_once or (self._phase == "training" and self._session < last):
                return
            if closing:  # others are still writing the last save of the previous run
                time.sleep(_CLOSING_SECONDS)
            self._end(reason.before_first_step(), reason.code, all_say=False)

    # Time

    def _expired(self, doing: Doing) -> None:
        """End the process after a stall, or report it to the others; in the watchdog's thread."""
        if self._member is _ALONE:
            self._log = (self.run_dir or Path()) / self._log
        self._dump(f"stalled in {doing.what}")
        if self._peers is not None:
            self._peers.stalled = True
            return
        self._end(
            f"stalled: {doing.what} takes longer than {doing.limit}_minutes allows; the stacks of all threads are in "
            f"{self._log}",
            LOST,
        )

    def _check_store(self) -> None:
        """End the process if process 0, which hosts the store, no longer answers; in the watchdog's thread."""
        peers = self._peers
        if peers is not None:
            silence = self.watchdog.clock - peers.heard
            if silence > silent_limit(self.watchdog.doing.limit) + 2 * _LAST_WORDS:
                self._judged(lost([self._process_0()], silence))

    # Ends

    def _process_0(self) -> str:
        return f"process {self._member.label(0)} at {self._member.address}"

    def _judged(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.by_itself:
            time.sleep(_LAST_WORDS)
        if not self._leaving:
            self._dump(verdict.why)
            self._end(f"{verdict.why}; the stacks of this process are in {self._log}", verdict.code)

    def _aborted(self) -> int:
        """Report why C++ aborts the process, and return the exit code."""
        if self._leaving:
            return LOST if self._verdict is None else self._verdict.code
        if self.reason is not None and self._phase != "training":
            return self.reason.code
        with self._log.open("rb") as file:
            file.seek(self._log_begin)
            service_lost = _SERVICE_LOST in file.read()
        if self._verdict is not None:
            why = self._verdict.why
            code = self._verdict.code
        elif service_lost:
            why = f"{self._process_0()} is lost: it died or ended"
            code = LOST
        else:
            why = "aborted in C++"
            code = 128 + signal.SIGABRT
        self._say(f"{why}; the output of C++ is in {self._log}")
        return code

    def _end(self, why: str, code: int, all_say: bool = True) -> None:
        """Report the reason and end the process, from any thread; process 0 ends last."""
        self._leaving = True
        if all_say or self.first:
            self._say(why)
        if self.first and self._peers is not None:
            time.sleep(_LAST_WORDS)
        sys.stdout.flush()
        os._exit(code)

    def _say(self, why: str) -> None:
        index = self._member.index
        count = self._member.count
        who = f"process {self._member.label(index)} of {count}: " if count > 1 else ""
        line_end = "\n" if sys.stderr.isatty() else ""  # ends the progress bar
        sys.stderr.write(f"{line_end}ringformer train: {who}{visible(why)}\n")
        sys.stderr.flush()

    def _dump(self, why: str) -> None:
        dump_stacks(self._log, f"{socket.gethostname()}, pid {os.getpid()}: {why}")

    def _note(self, text: str) -> None:
        with self._log.open("a") as file:
            file.write(text + "\n")
