"""The training loop: restore or initialise, step, evaluate, save."""

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager

import jax

from ringformer.checkpoints.copies import Copies
from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.saved_model import restore_params
from ringformer.data import save_tokenizer, too_often, too_short
from ringformer.data.stores.checked_array import DamagedStore
from ringformer.files.atomic import write_object, write_whole
from ringformer.files.run_layout import CARRIED, CHECKPOINTS, CONFIG, HF_CONFIG, METRICS
from ringformer.files.untrusted import contained_files
from ringformer.models.registry import registered_by
from ringformer.processes.run_lock import RunLock, told_by_process_0
from ringformer.processes.stopping import SaveClock, Stopping, Terminated, Termination, said_of
from ringformer.runs.config import Config
from ringformer.runs.identity import identity_hash, run_identity
from ringformer.runs.metrics import Reporter, evaluation_losses
from ringformer.runs.record import check_run, keep_record, note_saved, said
from ringformer.train.checks import check_state_finite, context_changes
from ringformer.train.debug_nans import check_operations
from ringformer.train.evaluation import make_evaluation
from ringformer.train.prepare import Run
from ringformer.train.reports import StepReports
from ringformer.train.state import TrainState, abstract_state, first_state, init_state
from ringformer.train.step import make_train_step


def train(run: Run, stopping: Stopping | None = None) -> TrainState:
    """Train to the last step, from the run's latest checkpoint if there is one; returns the final state.

    Args:
      stopping: who may end it before; without, a signal to this process, if it is a single one.

    Raises:
      FloatingPointError: the state is not finite, and is not saved; or too many steps in a row were skipped.
      Terminated: a signal came, and the state is saved.
      ValueError: another process trains in the run's folder, or what is there is another run (`record.check_run`);
        or a file of a store is not what was written, and nothing is saved of it; or no longer, and the steps before it
        was read are saved.
    """
    with RunLock(run.run_dir) as lock:
        try:
            return _train(run, lock, stopping or Termination())
        finally:
            if jax.process_index() == 0:
                note_saved(run.run_dir)


def _train(run: Run, lock: RunLock, stopping: Stopping) -> TrainState:
    config = run.config
    stopping.run_dir = run.run_dir
    stopping.doing("the start-up", "startup")
    changes = check_run(run.run_dir, config, run.tokenizer.name, run.allow)  # again: now nobody else writes there
    keep = Keep(config.keep_checkpoints, config.keep_every, config.keep_best)
    copies = _copies(run)
    checkpoints = Checkpoints(
        run.run_dir, abstract_state(run.shardings, run.optimizer, run.mesh), run.shardings, keep, copies
    )
    start, damage = checkpoints.newest_whole()
    # Later ones are of steps that are made again, maybe to other losses.
    keep.losses |= {step: loss for step, loss in evaluation_losses(run.run_dir).items() if step <= (start or 0)}
    state = _first_state(run) if start is None else checkpoints.restore(start)
    before, told, start = start, checkpoints.about(start), start or 0
    keep.resume(told, changes)
    saved = start

    def record():
        """Write what the run is: a changed one with the first step that was made so, for until then it may go on as it
        was."""
        _write_config(run)
        if jax.process_index() == 0:
            keep_record(run.run_dir, config, run.tokenizer.name, before, changes)

    unrecorded = bool(changes)
    if not unrecorded:
        record()
    reporter = Reporter(run.run_dir, start, config)
    shape = dict(zip(run.mesh.axis_names, run.mesh.devices.shape, strict=True))
    reporter.say(
        f"{config.model.num_params / 1e6:.1f}M parameters, {config.seq_len} tokens x {config.batch_size}, "
        f"mesh {shape}, from step {start} to {config.steps}, in {run.run_dir}"
    )
    for line in (*damage, *reporter.gaps):
        reporter.say(line)
    if changes:
        reporter.say(f"changed from step {start} on: {said(changes)}")
    if run.kernel:
        reporter.say(run.kernel)
    for change in context_changes(config) if start == 0 else ():
        reporter.say(f"{change}, from that of {config.init_from}")
    lengths = run.train_data.document_lengths()
    for store in lengths:
        reporter.say(str(store))
    passes = run.train_data.passes(config.steps)
    for folder, times in passes.items():
        reporter.say(f"{folder}: {times:,.3g} passes in {config.steps:,} steps")
    for warning in filter(None, (too_short(lengths), too_often(passes))):
        reporter.say(f"warning: {warning}")
    step_fn = make_train_step(
        run.model,
        run.optimizer,
        run.shardings,
        run.mesh,
        clip_norm=config.optimizer.clip_norm,
        accumulate=config.accumulate,
        skip_spikes=config.optimizer.skip_spikes > 0,
    )
    evaluation = make_evaluation(
        dataclasses.replace(config, model=run.model), run.eval_data, run.shardings.params, run.mesh
    )
    reports = StepReports(run, reporter, told, keep)
    identity = run_identity(config, run.tokenizer.name)
    about = {"run": identity_hash(identity), "data.store": identity["data.store"], "run_dir": str(run.run_dir)}

    # Stopping outlives the checkpoints: no signal may end the process while the last one is being written.
    with (
        closing(reporter),
        stopping,
        closing(checkpoints),
        closing(run.train_data.iterate(start, run.batch_sharding)) as batches,
    ):
        check_state_finite(state, _origin(run, start))
        if copies is not None and start:
            copies.begin(start, keep)

        def evaluate(step):
            stopping.doing(f"the evaluation of step {step}", "compile")
            with reading(step):
                values = evaluation(state.params, stop=stopping.due) if evaluation else None
            if values:
                reporter.evaluation(step, values)
                keep.losses |= {step: values["eval_loss"]} if "eval_loss" in values else {}

        def check(step):
            reports.flush()
            check_state_finite(state, f"after step {step}")

        def save(step):
            nonlocal unrecorded, saved
            stopping.doing(f"the save of step {step}, and the check of the stores before it", "none")
            verify()
            stopping.doing(f"the save of step {step}", "startup")
            check(step)
            if (doubt := keep.doubt()) and step < config.steps and not keep.skipping:
                reporter.say(f"warning: step {step} is saved, but {doubt}; a checkpoint that is proven stays")
            lock.check()
            reporter.sync()
            if unrecorded:
                record()
                unrecorded = False
            checkpoints.save(state, about | reports.told())
            if jax.process_index() == 0:
                note_saved(run.run_dir)  # of the save before, which is finished by now
            clock.saved(step)
            saved = step

        def verify():
            """Wait until all that was read of the stores so far is known to be what was written."""
            try:
                for store in run.stores:
                    store.check.wait(reporter.say)
            except DamagedStore as error:
                raise ValueError(
                    f"{error}. Steps from {start + 1} on may be trained on it, and none of them is saved: "
                    f"{_way_on(run, start)}"
                ) from None

        @contextmanager
        def reading(done):
            """What reads a store when `done` steps are made: if it is no longer what was verified, they are saved."""
            try:
                yield
            except DamagedStore as error:
                verify()
                if done > saved and jax.process_count() == 1:  # of several, the others are in a step without this one
                    save(done)
                trained = f"No step up to {done} was trained on it, step {done + 1} would be the first"
                raise ValueError(f"{error}. {trained}: {_way_on(run, saved)}") from error

        if evaluation and (start == 0 or _evaluates(config, start)) and not reporter.evaluated(start):
            evaluate(start)
        clock = SaveClock(config.checkpoint_minutes, start)
        stopping.doing(f"the compilation of step {start + 1}", "compile")
        due = False
        with _way_back(checkpoints):
            for step in range(start + 1, config.steps + 1):
                lock.check()
                with reading(step - 1):
                    batch = next(batches)
                state, metrics = step_fn(state, batch, *reports.largest_norm(step))
                if config.debug_nans:
                    check_operations(run, step, state.params, batch, metrics)
                # Others may still compile the first one.
                stopping.doing(f"step {step}", "step" if step > start + 1 else "compile", begun=True)
                reports.enqueued(step, metrics)
                checkpoints.check()
                due |= clock.due(step) or _due(step, config.checkpoint_every)
                if due:
                    reports.flush()
                saves = step == config.steps or (due and not keep.skipping)  # while steps are skipped a save waits
                if saves:
                    save(step)
                    due = False
                if evaluation and _evaluates(config, step):
                    check(step)
                    evaluate(step)
                if stopping.due():
                    if not saves:
                        save(step)
                    reports.conclude(step - start)
                    again = "" if config.run_dir else f" with --config.run_dir={run.run_dir}"
                    number = stopping.signal or signal.SIGTERM
                    diverged = f". But {doubt}. {checkpoints.way_back()}" if (doubt := keep.doubt()) else ""
                    raise Terminated(
                        f"stopped by {said_of(number)} at step {step} of {config.steps}, which is saved in "
                        f"{run.run_dir}: the same command{again} goes on from there{diverged}",
                        number,
                    )
                stopping.doing(f"the batch of step {step + 1}")
                reports.resume()
        reports.conclude(config.steps - start)
        if doubt := keep.doubt():
            reporter.say(f"warning: {doubt}. {checkpoints.way_back()}")
        stopping.doing("the end of the last save", "startup")
    return state


@contextmanager
def _way_back(checkpoints: Checkpoints) -> Iterator[None]:
    """What diverges within it says which checkpoint to go back to."""
    try:
        yield
    except FloatingPointError as error:
        way_back = f"The same command goes on from the latest checkpoint. {checkpoints.way_back()}"
        raise FloatingPointError(f"{error}. {way_back}") from error


def _copies(run: Run) -> Copies | None:
    """What copies the run's checkpoints, on process 0 alone. Raises ValueError, on all, if there are other ones where
    they would go, and OSError if nothing can be said of it."""
    copies, failed = None, None
    if run.config.copy_to and jax.process_index() == 0:
        try:
            copies = Copies(run.run_dir, run.config.copy_to)
            failed = copies.refusal()
        except OSError as error:
            failed = str(error)
    if failed := told_by_process_0(failed or ""):
        raise ValueError(failed)
    return copies


def _first_state(run: Run) -> TrainState:
    """A state drawn from the seed; with the parameters of another run, if the config names one."""
    config = run.config
    if not config.init_from:
        return init_state(config.model, run.optimizer, run.shardings, run.mesh, config.seed)
    params = restore_params(config.init_from, run.shardings.params, run.mesh)
    return first_state(params, run.optimizer, run.shardings, run.mesh)


def _way_on(run: Run, saved: int) -> str:
    """What a run can go on from when its stores are whole again."""
    if not saved:
        return "there is no checkpoint, and the run has to begin again"
    return f"with a store that is whole the same command goes on from step {saved}, which is saved in {run.run_dir}"


def _origin(run: Run, start: int) -> str:
    """Where the first state comes from, and what to do if it is not finite."""
    if start:
        folder = run.run_dir / CHECKPOINTS / str(start)
        return f"of {folder}, which is damaged: delete that folder to go on from the checkpoint before"
    return f"of init_from={run.config.init_from}" if run.config.init_from else "that the seed gave"


def _write_config(run: Run) -> None:
    """Keep the resolved config and the tokenizer beside the run, and what came along with a converted model."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        write_object(run.run_dir / CONFIG, dataclasses.asdict(run.config) | registered_by(run.config.model))
        (run.run_dir / METRICS).touch()  # now it is a run, interrupted or not, and no converted model
        for file in contained_files(run.config.init_from, (*CARRIED, HF_CONFIG)) if run.config.init_from else ():
            write_whole(run.run_dir / file.name, file.read_bytes())
        save_tokenizer(run.tokenizer, run.run_dir)


def _evaluates(config: Config, step: int) -> bool:
    return step == config.steps or _due(step, config.eval_every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
