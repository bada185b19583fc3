"""Saves of a run: when one is due, and all that is checked before it and recorded with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from ringformer.checkpoints.manager import Checkpoints
from ringformer.data.stores.checked_array import DamagedStore
from ringformer.processes.stopping import Phase, Stopping
from ringformer.runs.folder import RunFolder
from ringformer.train.checks import check_state_finite
from ringformer.train.prepare import Run
from ringformer.train.reports import StepReports
from ringformer.train.state import TrainState


class SaveClock:
    """Tells when `minutes` have passed since the last save, at the same step on all processes; 0: never.

    Process 0 looks at its clock and tells the others, and how many steps to wait before they ask again, those of half
    the time that is left: the devices wait while they agree.
    """

    def __init__(self, minutes: float, step: int):
        self._seconds = 60 * minutes
        self._started, self._first = time.monotonic(), step
        self._saved, self._ask_at = self._started, step + 1

    def saved(self, step: int) -> None:
        """Note that the state of `step` was saved."""
        self._saved, self._ask_at = time.monotonic(), step + 1

    def due(self, step: int) -> bool:
        """Return whether it is time to save the state of `step`; all processes ask at every step."""
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


class Saving:
    """Saves the states of a run, each once it is known to be sound and to come from sound data."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        checkpoints: Checkpoints,
        reports: StepReports,
        stopping: Stopping,
    ):
        self._run, self._folder, self._checkpoints = run, folder, checkpoints
        self._reports, self._stopping, self._start = reports, stopping, folder.start or 0
        self._clock = SaveClock(run.config.checkpoint_minutes, self._start)
        self._due = False
        self.saved = self._start
        """The latest step that was saved, or from which the run goes on."""

    def save_if_due(self, state: TrainState, step: int) -> None:
        """Save after the last step, and when the clock or the number of steps says so. While steps are skipped a save
        waits for one that trains."""
        config = self._run.config
        self._due |= self._clock.due(step) or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)
        if self._due:
            self._reports.flush()
        if step == config.steps or (self._due and not self._folder.keep.skipping):
            self.save(state, step)
            self._due = False

    def save(self, state: TrainState, step: int) -> None:
        """Save the state of `step`, unless it is saved already.

        Raises FloatingPointError for a state that is not finite, and ValueError for a store that is not what was
        written: neither is saved.
        """
        if step == self.saved:
            return
        with self._stopping.phase(Phase.STORE_CHECK, step):
            self._verify_stores()
        with self._stopping.phase(Phase.SAVE, step):
            self._reports.flush()
            check_state_finite(state, lambda: f"after step {step}")
            keep = self._folder.keep
            if (doubt := keep.doubt()) and step < self._run.config.steps and not keep.skipping:
                self._reports.say(f"warning: step {step} is saved, but {doubt}; a checkpoint that is proven stays")
            self._reports.sync()
            self._folder.save(self._checkpoints, state, self._reports.notes())
        self._clock.saved(step)
        self.saved = step

    @contextmanager
    def reading(self, state: TrainState, step: int) -> Iterator[None]:
        """Read from the stores after `step`. If one is no longer what was verified, the steps so far are saved.

        Raises ValueError with the name of the file, and the step to go on from.
        """
        try:
            yield
        except DamagedStore as error:
            self._verify_stores()
            if step > self.saved and jax.process_count() == 1:  # of several, the others are in a step without this one
                self.save(state, step)
            trained = f"No step up to {step} was trained on it, step {step + 1} would be the first"
            raise ValueError(f"{error}. {trained}: {self._way_on(self.saved)}") from error

    def _verify_stores(self) -> None:
        """Wait until everything that was read of the stores so far is known to be what was written."""
        try:
            for store in self._run.stores:
                store.check.wait(self._reports.say)
        except DamagedStore as error:
            raise ValueError(
                f"{error}. Steps from {self._start + 1} on may be trained on it, and none of them is saved: "
                f"{self._way_on(self._start)}"
            ) from None

    def _way_on(self, saved: int) -> str:
        """Tell what a run can go on from when its stores are whole again."""
        if not saved:
            return "there is no checkpoint, and the run has to begin again"
        whole = "with a store that is whole the same command goes on from step"
        return f"{whole} {saved}, which is saved in {self._run.run_dir}"
