"""Saves of a run: when they are due, the checks before them, and the notes saved with them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from ringformer.checkpoints.manager import Checkpoints
from ringformer.data.stores.checked_array import DamagedStore
from ringformer.processes.agreement import from_process_0
from ringformer.processes.stopping import FAILED, LOST, InputLost, Phase, Stopped, Stopping, StopReason
from ringformer.runs.folder import RunFolder
from ringformer.train.host_failure import host_failure
from ringformer.train.prepare import Run
from ringformer.train.reports import StepReports
from ringformer.train.state import TrainState, check_state_finite

MOST_STEPS = 2**31
"""Most steps until the processes ask again: `checkpoint_minutes` may be infinite."""


class SaveClock:
    """Clock that reports, at the same step on all processes, that `minutes` have passed since the last save; 0: never.

    Process 0 decides by its clock. It tells the other processes its decision and the number of steps until they ask
    again. That is the number of steps that fit into half of the remaining time; asking at every step would make the
    processes wait for the slowest.
    """

    def __init__(self, minutes: float, step: int):
        self._seconds = 60 * minutes
        self._started = time.monotonic()
        self._first = step
        self._saved = self._started
        self._ask_at = step + 1

    def saved(self, step: int) -> None:
        """Record that the state of `step` was saved."""
        self._saved = time.monotonic()
        self._ask_at = step + 1

    def due(self, step: int) -> bool:
        """Return whether it is time to save the state of `step`; all processes call this at every step."""
        if not self._seconds or step < self._ask_at:
            return False
        now = time.monotonic()
        left = self._seconds - (now - self._saved)
        if jax.process_count() == 1:
            return left <= 0
        pace = (now - self._started) / (step - self._first)
        steps_until_half = left / 2 / max(pace, 1e-9)
        wait = int(min(max(1, steps_until_half), MOST_STEPS))
        due, wait = from_process_0([left <= 0, wait])
        self._ask_at = step + wait
        return due


class Saving:
    """Saves the states of a run, after checking that they are finite and come from undamaged data."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        checkpoints: Checkpoints,
        reports: StepReports,
        stopping: Stopping,
    ):
        self._run = run
        self._folder = folder
        self._checkpoints = checkpoints
        self._reports = reports
        self._stopping = stopping
        self._start = folder.start or 0
        self._clock = SaveClock(run.config.checkpoint_minutes, self._start)
        self._due = False
        self.saved: int = self._start
        """Latest step that was saved, or that the run continues from."""

    def save_if_due(self, state: TrainState, step: int) -> None:
        """Save after the last step, and whenever the clock or the number of steps requires a save.

        While steps are being skipped, the save is postponed until a step trains again.
        """
        config = self._run.config
        self._due |= self._clock.due(step) or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)
        if self._due:
            self._reports.flush()
        if step == config.steps or (self._due and not self._folder.keep.skipping):
            self.save(state, step)
            self._due = False

    def save(self, state: TrainState, step: int) -> None:
        """Save the state of `step`, unless it is already saved.

        Raises FloatingPointError for a state that is not finite, and ValueError for a damaged store; in either case
        nothing is saved.
        """
        if step == self.saved:
            return
        self._stopping.enter(Phase.STORE_CHECK, step)
        self._verify_stores()
        self._stopping.enter(Phase.SAVE, step)
        self._reports.flush()
        check_state_finite(state, f"after step {step}")
        keep = self._folder.keep
        if (doubt := keep.doubt()) and step < self._run.config.steps and not keep.skipping:
            self._reports.say(f"warning: step {step} is saved, but {doubt}; the newest proven checkpoint is kept")
        self._reports.sync()
        self._folder.save(self._checkpoints, state, {"kernel": self._run.kernel} | self._reports.notes())
        self._clock.saved(step)
        self.saved = step

    @contextmanager
    def reading(self, state: TrainState, step: int) -> Iterator[None]:
        """Context for reading from the stores after `step`. If a store has changed since it was verified, raise
        ValueError with the name of the file and the step to resume from. A single process first saves the steps so far.
        """
        try:
            yield
        except DamagedStore as error:
            self._verify_stores()
            if step > self.saved and jax.process_count() == 1:  # with several, the others are in the next step
                self.save(state, step)
            trained = f"No step up to {step} was trained on it, step {step + 1} would be the first"
            raise ValueError(f"{error}. {trained}: {self._way_on(self.saved)}") from error

    @contextmanager
    def rescuing(self, state: TrainState, step: int) -> Iterator[None]:
        """Context for work of the host after `step` that the next step needs, and that leaves the state sound.

        If it fails, a single process saves the state, and raises Stopped. One of several processes cannot
        save alone: InputLost is raised. An error that refuses the run, or says that it diverged, is raised as it is; a
        single process saves before a refusal.
        """
        try:
            yield
        except (FloatingPointError, Stopped):
            raise
        except Exception as error:
            if step == 0:
                raise
            if jax.process_count() > 1:
                if isinstance(error, ValueError | jax.errors.JaxRuntimeError):
                    raise
                raise self._input_lost(step, error) from error
            try:
                self.save(state, step)
            except Exception as refused:
                error.add_note(f"the state of step {step} could not be saved either: {refused}")
                raise error from None
            if isinstance(error, ValueError):
                raise
            raise self.stopped(host_failure(self._run.run_dir, step, error), step) from error

    def stopped(self, reason: StopReason, step: int) -> Stopped:
        """Return the exception of a run that stopped for `reason` after `step`, which is saved."""
        run = self._run
        another_folder = "" if run.config.run_dir else f", with --config.run_dir={run.run_dir}"
        message = (
            f"{reason.why} at step {step} of {run.config.steps}, which is saved in {run.run_dir}: "
            f"{reason.way_on}{another_folder}"
        )
        if doubt := self._folder.keep.doubt():
            message += f". But {doubt}. {self._checkpoints.way_back()}"
        return Stopped(message, reason.code)

    def _input_lost(self, step: int, error: Exception) -> InputLost:
        """Return the exception of a process that cannot take part in what the others begin after `step`."""
        reason = host_failure(self._run.run_dir, step, error)
        code = reason.code if reason.code == FAILED else LOST
        lost = f"the {step - self.saved} steps since step {self.saved} are lost"
        return InputLost(f"{reason.why}, and {lost}, because the others cannot save without it: {reason.way_on}", code)

    def _verify_stores(self) -> None:
        """Wait until everything that was read from the stores so far has been verified."""
        try:
            for store in self._run.stores:
                store.check.wait(self._reports.say)
        except DamagedStore as error:
            raise ValueError(
                f"{error}. Steps from {self._start + 1} on may be trained on it, and none of them is saved: "
                f"{self._way_on(self._start)}"
            ) from None

    def _way_on(self, saved: int) -> str:
        """Describe where the run resumes once its stores are restored."""
        if not saved:
            return "there is no checkpoint, so the run has to begin again"
        return f"with an intact store the same command resumes from step {saved}, which is saved in {self._run.run_dir}"
