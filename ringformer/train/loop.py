"""The training loop: check everything, restore or initialise, step, evaluate, save."""

import dataclasses
import json
import shutil
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from ringformer.data import (
    Loader,
    Tokenizer,
    TokenStore,
    check_vocabulary,
    load_tokenizer,
    open_mixture,
    open_or_build,
    save_tokenizer,
    too_short,
)
from ringformer.data.loader import Parts
from ringformer.hardware import chip_of
from ringformer.mesh import BATCH, make_mesh
from ringformer.models.interface import ModelConfig
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import check_mesh, flops_per_token
from ringformer.train.checkpoints import CARRIED, HF_CONFIG, Checkpoints, restore_params
from ringformer.train.config import Config
from ringformer.train.evaluation import count_batches, make_evaluation
from ringformer.train.optimizer import make_optimizer, schedule
from ringformer.train.preemption import SaveClock, Terminated, Termination
from ringformer.train.reporter import Reporter
from ringformer.train.run_checks import (
    BatchWatch,
    check_batch,
    check_folders,
    check_host_pool,
    check_metrics_finite,
    check_platform,
    check_state_finite,
    context_changes,
)
from ringformer.train.state import TrainState, decayed, first_state, init_state, state_shardings, weight_shardings
from ringformer.train.step import make_train_step
from ringformer.untrusted_files import contained_files


class Run(NamedTuple):
    """A checked configuration and what belongs to it; nothing is compiled yet."""

    config: Config
    run_dir: Path
    mesh: Mesh
    tokenizer: Tokenizer
    train_data: Loader
    eval_data: Loader | None
    optimizer: optax.GradientTransformation
    shardings: TrainState
    model: ModelConfig
    """The config's, with the kernel and the chunks that these devices compute it with."""
    kernel: str
    """Which kernel that is, and why; empty for a family that has no choice."""

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH)


def prepare(config: Config) -> Run:
    """Check the configuration against devices, data and tokenizer; raise ValueError naming what clashes."""
    run_dir = Path(config.run_dir or _new_run_dir())
    check_folders(run_dir, config)  # first: the rest may take hours
    mesh = make_mesh(config.mesh_dim)
    check_mesh(config.model, mesh)
    check_batch(config.model, mesh, config.seq_len, config.batch_size, config.accumulate)
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    check_platform(config.model, device.platform, chip)
    check_host_pool(config, mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    d = config.data
    train_store: TokenStore | Parts
    eval_store: TokenStore | Parts | None
    if d.mixture:
        train_store, eval_store = open_mixture(d.mixture, tokenizer.name, held_out=d.held_out > 0)
    else:
        train_store, eval_store = open_or_build(d.store, d, tokenizer)
    optimizer = make_optimizer(config.optimizer, config.steps, decayed(config.model))
    shardings = state_shardings(weight_shardings(config.model, mesh), optimizer)
    train_data = _loader(train_store, config, mesh, config.seed)
    eval_data = _loader(eval_store, config, mesh, seed=0) if eval_store else None
    masks = any(data.sequences.has_segments for data in (train_data, eval_data) if data)
    model, kernel = with_kernel(config.model, device.platform, chip, config.seq_len // mesh.shape["sp"], masks)
    run = Run(config, run_dir, mesh, tokenizer, train_data, eval_data, optimizer, shardings, model, kernel)
    count_batches(config, run.eval_data)
    return run


def train(run: Run) -> TrainState:
    """Train to the last step, from the run's latest checkpoint if there is one; returns the final state.

    Raises:
      FloatingPointError: a loss, a gradient or the state is not finite; nothing is saved of it.
      Terminated: SIGTERM came, and the state is saved.
    """
    config = run.config
    _write_config(run)
    checkpoints = Checkpoints(run.run_dir, run.shardings, run.optimizer, run.mesh, config.keep_checkpoints)
    start = checkpoints.latest_step
    if start is None:
        start, state = 0, _first_state(run)
    else:
        state = checkpoints.restore(start)
    reporter = Reporter(run.run_dir, start, config)
    shape = dict(zip(run.mesh.axis_names, run.mesh.devices.shape, strict=True))
    reporter.say(f"{config.model.num_params / 1e6:.1f}M parameters, {config.seq_len} tokens x {config.batch_size}, "
                 f"mesh {shape}, from step {start} to {config.steps}, in {run.run_dir}")  # fmt: skip
    if run.kernel:
        reporter.say(run.kernel)
    for change in context_changes(config) if start == 0 else ():
        reporter.say(f"{change}, from that of {config.init_from}")
    lengths = run.train_data.document_lengths()
    for store in lengths:
        reporter.say(str(store))
    if warning := too_short(lengths):
        reporter.say(f"warning: {warning}")
    step_fn = make_train_step(
        run.model, run.optimizer, run.shardings, run.mesh,
        clip_norm=config.optimizer.clip_norm, accumulate=config.accumulate,
    )  # fmt: skip
    evaluation = make_evaluation(
        dataclasses.replace(config, model=run.model), run.eval_data, run.shardings.params, run.mesh
    )
    reports = _StepReports(run, reporter)

    # Termination outlives the checkpoints: SIGTERM must not end the process while the last one is being written.
    with (
        closing(reporter), Termination() as termination, closing(checkpoints),
        closing(run.train_data.iterate(start, run.batch_sharding)) as batches,
    ):  # fmt: skip
        check_state_finite(state, _origin(run, start))

        def evaluate(step):
            if evaluation and (values := evaluation(state.params, stop=lambda: termination.requested)):
                reporter.evaluation(step, values)

        def check(step):
            reports.flush()
            check_state_finite(state, f"after step {step}")

        def save(step):
            check(step)
            checkpoints.save(state)
            clock.saved(step)

        if evaluation and (start == 0 or _evaluates(config, start)) and not reporter.evaluated(start):
            evaluate(start)
        clock = SaveClock(config.checkpoint_minutes, start)
        for step in range(start + 1, config.steps + 1):
            state, metrics = step_fn(state, next(batches))
            reports.enqueued(step, metrics)
            saves = clock.due(step) or step == config.steps or _due(step, config.checkpoint_every)
            if saves:
                save(step)
            if evaluation and _evaluates(config, step):
                check(step)
                evaluate(step)
            if termination.requested:
                if not saves:
                    save(step)
                reports.conclude(step - start)
                again = "" if config.run_dir else f" with --config.run_dir={run.run_dir}"
                raise Terminated(f"stopped by SIGTERM at step {step} of {config.steps}, which is saved in "
                                 f"{run.run_dir}: the same command{again} goes on from there")  # fmt: skip
            reports.resume()
        reports.conclude(config.steps - start)
    return state


class _StepReports:
    """The metrics of steps, checked and handed to the reporter one step late, so that the devices never wait for it."""

    def __init__(self, run: Run, reporter: Reporter):
        config = run.config
        self._watch = BatchWatch(chats=run.train_data.sequences.masked)
        self._chats, self._reporter = run.train_data.sequences.masked, reporter
        self._rate = schedule(config.optimizer, config.steps)
        self._tokens = config.batch_size * config.seq_len
        chip = chip_of(run.mesh.devices.flat[0].device_kind)
        flops = flops_per_token(config.model, config.seq_len)
        self._mfu_per_rate = flops / (chip.bf16_flops * run.mesh.size) if chip and flops else None
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._last = time.perf_counter()

    def enqueued(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Report the step before this one, which is under way."""
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Report what is not reported yet; waits for it."""
        if self._pending:
            (step, metrics), self._pending = self._pending, None
            self._report(step, {name: float(value) for name, value in jax.device_get(metrics).items()})

    def resume(self) -> None:
        """Begin the clock anew after a pause, for an evaluation or a save: its time is no step's."""
        if self._pending is None:
            self._last = time.perf_counter()

    def conclude(self, steps: int) -> None:
        """Say what was odd in these many steps."""
        for line in self._watch.summary(steps):
            self._reporter.say(line)

    def _report(self, step, metrics):
        check_metrics_finite(step, metrics)
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        values = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"],
                  "learning_rate": float(self._rate(step - 1)), "trained_tokens": int(metrics["tokens"]),
                  "masked_tokens": int(metrics["masked"]),
                  "tokens_per_second": self._tokens / seconds}  # fmt: skip
        if self._mfu_per_rate:
            values["mfu"] = self._mfu_per_rate * values["tokens_per_second"]
        said = self._watch.see(step, values)
        if not values["trained_tokens"]:
            del values["loss"]  # it is of no token
        if not self._chats:
            del values["masked_tokens"]
        self._reporter.step(step, values)
        for line in said:
            self._reporter.say(line)


def _loader(store: TokenStore | Parts, config: Config, mesh: Mesh, seed: int) -> Loader:
    return Loader(
        store, batch_size=config.batch_size, seq_len=config.seq_len, seed=seed, layout=config.model.layout,
        ring_size=mesh.shape["sp"], packing=config.data,
    )  # fmt: skip


def _new_run_dir() -> str:
    if jax.process_count() > 1:
        raise ValueError("several processes need one folder: name it, e.g. --config.run_dir=/shared/runs/mine")
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"


def _first_state(run: Run) -> TrainState:
    """A state drawn from the seed; with the parameters of another run, if the config names one."""
    config = run.config
    if not config.init_from:
        return init_state(config.model, run.optimizer, run.shardings, run.mesh, config.seed)
    params = restore_params(config.init_from, run.shardings.params, run.mesh)
    return first_state(params, run.optimizer, run.shardings, run.mesh)


def _origin(run: Run, start: int) -> str:
    """Where the first state comes from, and what to do if it is not finite."""
    if start:
        folder = run.run_dir / "checkpoints" / str(start)
        return f"of {folder}, which is damaged: delete that folder to go on from the checkpoint before"
    return f"of init_from={run.config.init_from}" if run.config.init_from else "that the seed gave"


def _write_config(run: Run) -> None:
    """Keep the resolved config and the tokenizer beside the run, and what came along with a converted model."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        resolved = dataclasses.asdict(run.config)
        write_json(run.run_dir / "config.json", resolved)
        (run.run_dir / "metrics.jsonl").touch()  # now it is a run, interrupted or not, and no converted model
        for file in contained_files(run.config.init_from, (*CARRIED, HF_CONFIG)) if run.config.init_from else ():
            shutil.copyfile(file, run.run_dir / file.name)
        save_tokenizer(run.tokenizer, run.run_dir)


def write_json(path: Path, content) -> None:
    """Write JSON in one piece: another process may be reading it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def _evaluates(config: Config, step: int) -> bool:
    return step == config.steps or _due(step, config.eval_every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
