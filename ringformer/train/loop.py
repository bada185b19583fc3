"""The training loop: it restores or initialises the state, then runs steps, saves, evaluates, and checks for a stop."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ringformer.checkpoints.manager import Checkpoints
from ringformer.processes.run_lock import RunLock
from ringformer.processes.stopping import Phase, Stopping, Termination
from ringformer.runs.folder import RunFolder
from ringformer.train.evaluation import Evaluation
from ringformer.train.host_failure import host_failure
from ringformer.train.prepare import Run
from ringformer.train.reports import StepReports
from ringformer.train.saving import Saving
from ringformer.train.skipped_steps import check_operations
from ringformer.train.state import TrainState, check_state_finite


def train(run: Run, stopping: Stopping | None = None) -> TrainState:
    """Train to the last step, from the run's latest checkpoint if there is one, and return the final state.

    Args:
      stopping: decides when to stop early; by default, a signal stops the run early if it has a single process.

    Raises:
      FloatingPointError: the state is not finite and was not saved, or too many steps in a row were skipped.
      Stopped: a signal ended the run, or the host failed between two steps, and the state was saved.
      ValueError: another process trains in the run's folder, or the folder holds another run (`record.check_run`), or a
        file of a store is damaged (no state that was trained on it was saved).
    """
    stopping = stopping or Termination()
    stopping.run_dir = run.run_dir
    stopping.enter(Phase.STARTUP)
    with RunLock(run.run_dir) as lock:
        folder = RunFolder(
            lock,
            run.run_dir,
            run.config,
            run.tokenizer,
            run.identity,
            run.checked,
            run.allow,
            run.texts_begin,
        )
        with closing(folder):
            return _train(run, folder, stopping)


def _train(run: Run, folder: RunFolder, stopping: Stopping) -> TrainState:
    config = run.config
    program = run.program
    checkpoints, state = folder.resume(program.state, program.shardings)
    start = folder.start or 0
    if state is None:
        state = run.first_state()
    frozen = run.frozen() if program.lora else []
    reports = StepReports(run, folder)
    saving = Saving(run, folder, checkpoints, reports, stopping)
    data = run.eval_data
    evaluation = None
    if data is not None:
        evaluation = Evaluation(run, frozen, data, folder, reports, saving, stopping)
    batches = run.train_data.iterate(start, program.batch_sharding)
    compiled: set[int] = set()

    # `stopping` outlives the checkpoints: no signal may end the process while the last one is being written.
    with closing(reports), stopping, closing(checkpoints), closing(batches):
        check_state_finite(state, run.origin(folder.start))
        if config.copy_to:
            folder.begin_copies()
        if evaluation:
            with saving.rescuing(state, start):
                evaluation.run_if_due(state, start)
        stopping.enter(Phase.COMPILATION, start + 1)
        with _way_back(checkpoints):
            for step in range(start + 1, config.steps + 1):
                folder.check()
                with saving.rescuing(state, step - 1), saving.reading(state, step - 1):
                    batch = next(batches)
                largest_norm = [reports.largest_norm(step)] if config.optimizer.skip_spikes else []
                rings = run.train_data.rings(step - 1)
                if rings not in compiled and compiled:
                    stopping.enter(Phase.COMPILATION, step)
                if reports.held:
                    reports.flush()
                began = time.perf_counter()
                state, metrics = program.step_on(rings)(state, batch, *frozen, *largest_norm)
                if config.debug_nans:
                    check_operations(run, step, (state.params, batch, *frozen), metrics)
                stopping.enter(Phase.STEP if rings in compiled else Phase.FIRST_STEP, step)
                compiled.add(rings)
                with saving.rescuing(state, step):
                    reports.handed_over(step, metrics, began)
                checkpoints.check()
                saving.save_if_due(state, step)
                if evaluation:
                    with saving.rescuing(state, step):
                        evaluation.run_if_due(state, step)
                if failure := reports.take_failure():
                    reports.say(f"warning: a report failed, so the run stops early: {failure}")
                    stopping.request(host_failure(run.run_dir, step, failure))
                if reason := stopping.due():
                    saving.save(state, step)
                    reports.conclude(step)
                    raise saving.stopped(reason, step)
                reports.resume()
                stopping.enter(Phase.BATCH, step + 1)
        reports.conclude(config.steps)
        if doubt := folder.keep.doubt():
            reports.say(f"warning: {doubt}. {checkpoints.way_back()}")
        stopping.enter(Phase.LAST_SAVE)
    return state


@contextmanager
def _way_back(checkpoints: Checkpoints) -> Iterator[None]:
    """Context that, if the run diverges, completes its error with the checkpoint to go back to."""
    try:
        yield
    except FloatingPointError as error:
        way_back = f"The same command resumes the run from the latest checkpoint. {checkpoints.way_back()}"
        raise FloatingPointError(f"{error}. {way_back}") from error
