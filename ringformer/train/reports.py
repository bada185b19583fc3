"""Reports of a run: a description at its start, and the metrics of each step, without waiting for it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.data import describe_passes, too_often, too_short
from ringformer.data.stores.beginning import describe_earlier
from ringformer.hardware import GiB, chip_of
from ringformer.models.registry import flops_per_token, registered_by
from ringformer.runs import step_clock
from ringformer.runs.config import Config
from ringformer.runs.folder import RunFolder
from ringformer.runs.metrics import BatchWatch, Reporter
from ringformer.runs.record import Changes, describe
from ringformer.train.checks import context_changes, theta_warnings
from ringformer.train.optimizer import schedule
from ringformer.train.prepare import Run
from ringformer.train.skipped_steps import SkippedSteps


class StepReports:
    """Checks the metrics of steps and reports them while the next step is computed, so that the devices never wait for
    the host.

    A report that cannot be written raises nothing: `take_failure` has its error, so that the step can end first.
    """

    held: bool = False
    """True if handing over the last step held the host until it had nearly ended: report it before the next one."""

    def __init__(self, run: Run, folder: RunFolder):
        config = run.config
        mesh = run.program.mesh
        start = folder.start or 0
        self._reporter = reporter = Reporter(run.run_dir, start, config)
        self.say: Callable[..., None] = reporter.say
        self.close: Callable[[], None] = reporter.close
        self.evaluated: Callable[[int], bool] = reporter.evaluated
        self._start = start
        self._keep = folder.keep
        self._chats = run.train_data.sequences.masked
        self._watch = BatchWatch(chats=self._chats)
        self._rate = schedule(config.optimizer, config.steps)
        self._skipped = SkippedSteps(config, run.train_data, reporter.history, folder.about_start)
        self._everywhere = NamedSharding(mesh, P())
        self._tokens = config.batch_size * config.seq_len
        chip = chip_of(mesh.devices.flat[0].device_kind)
        flops = flops_per_token(config.model, config.seq_len, frozen=config.lora.rank > 0)
        self._mfu_per_rate: float | None = None
        if chip and flops:
            self._mfu_per_rate = flops / (chip.bf16_flops * mesh.size)
        self._devices = mesh.local_devices
        self._failure: Exception | None = None
        self._pending: tuple[int, dict[str, jax.Array], Future[Any]] | None = None
        self._last = time.perf_counter()
        self._announce(run, folder)

    def notes(self) -> dict[str, Any]:
        """Return notes for a resumed run: skipped steps, recent gradient norms, losses."""
        return self._skipped.notes() | self._keep.notes()

    def largest_norm(self, step: int) -> jax.Array:
        """Return the norm above which the train step skips this step if `skip_spikes` is set, as a replicated
        float32."""
        limit = self._skipped.largest_norm(step)
        return jax.make_array_from_callback((), self._everywhere, lambda _: np.float32(limit))

    def handed_over(self, step: int, metrics: dict[str, jax.Array], began: float) -> None:
        """Report the previous step while this one is being computed.

        Args:
          began: moment, as `time.perf_counter`, at which the host began to hand this step to the devices.
        """
        self.held = time.perf_counter() - began >= step_clock.HELD_SECONDS
        ended = step_clock.end_of(metrics)
        try:
            self.flush()
        finally:
            self._pending = step, metrics, ended

    def flush(self) -> None:
        """Wait for the step that has not been reported yet, and report it."""
        if self._pending is None:
            return
        step, metrics, ended = self._pending
        self._pending = None
        moment = ended.result()
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        with self._kept():
            self._report(step, numbers, moment)

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Report the metrics of an evaluation, from `evaluation.evaluate`."""
        with self._kept():
            self._reporter.evaluation(step, values)

    def sync(self) -> None:
        """Wait until the rows are on disk, so that no checkpoint outlives the rows of its steps."""
        with self._kept():
            self._reporter.sync()

    def take_failure(self) -> Exception | None:
        """Return the first error of the reports since the last call, or None."""
        failure = self._failure
        self._failure = None
        return failure

    def resume(self) -> None:
        """Restart the clock after an evaluation or a save, whose time belongs to no step."""
        if self._pending is None:
            self._last = time.perf_counter()

    def conclude(self, step: int) -> None:
        """Summarise odd batches and skipped steps up to this step."""
        for line in (*self._watch.summary(step - self._start), *self._skipped.summary()):
            self.say(line)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Context that keeps the error of a report, unless it refuses the run or says that it diverged."""
        try:
            yield
        except (FloatingPointError, ValueError):
            raise
        except Exception as error:
            self._failure = self._failure or error

    def _announce(self, run: Run, folder: RunFolder) -> None:
        """Describe the run, and warn of suspicious data."""
        config = run.config
        mesh = run.program.mesh
        start = self._start
        family = registered_by(config.model)["family"]
        shape = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        lines = [
            f"{family}, {config.model.num_params / 1e6:.1f}M parameters, {config.seq_len} tokens x "
            f"{config.batch_size}, mesh {shape}, from step {start} to {config.steps}, in {run.run_dir}"
        ]
        if config.lora.rank:
            lines.append(describe_adapters(config))
        lines += folder.damage
        lines += self._reporter.gaps
        if folder.changes:
            lines += self._describe_changes(config, folder)
        if run.kernel:
            lines.append(run.kernel)
        if start == 0 and config.init_from:
            lines += _describe_context(config)
        lines += _describe_data(run)
        for line in lines:
            self.say(line)

    def _describe_changes(self, config: Config, folder: RunFolder) -> list[str]:
        """Describe what changed since the last checkpoint, and the learning rate of the next step before and after."""
        step = self._start + 1
        lines = [f"changed from step {self._start} on: {describe(folder.changes)}"]
        updates = self._skipped.updates_before(step)
        before = float(_schedule_before(config, folder.changes)(updates))
        after = float(self._rate(updates))
        if before != after:
            lines.append(f"learning rate of step {step}: {before:.3g} -> {after:.3g}")
        return lines

    def _report(self, step, metrics, moment):
        seconds = moment - self._last
        self._last = moment
        values = {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "learning_rate": float(self._rate(self._skipped.updates_before(step))),
            "trained_tokens": int(metrics["tokens"]),
            "masked_tokens": int(metrics["masked"]),
            "tokens_per_second": self._tokens / seconds,
        }
        if self._mfu_per_rate:
            values["mfu_palm"] = self._mfu_per_rate * values["tokens_per_second"]
        peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self._devices)
        if peak > 0:
            values["peak_memory_gib"] = peak / GiB
        remarks = self._watch.see(step, values)
        if not values["trained_tokens"]:
            del values["loss"]  # it has no tokens
        if not self._chats:
            del values["masked_tokens"]
        skipped = self._skipped.see(step, metrics)
        if skipped:
            self._keep.see(step, None)
            finite = {name: value for name, value in values.items() if np.isfinite(value)}
            values = finite | skipped
            remarks.append(f"step {step} is skipped: {skipped['skipped']}; its batch: {skipped['batch']}")
        elif "loss" in values:
            self._keep.see(step, values["loss"])
        self._reporter.step(step, values)
        for line in remarks:
            self.say(line)
        self._skipped.check(step)


def _describe_context(config: Config) -> list[str]:
    """Describe the positional settings that differ from those of init_from, and warn of those that are too small."""
    changed = context_changes(config)
    if not changed:
        return []
    lines = [f"{change}, compared with {config.init_from}" for change in changed]
    return lines + theta_warnings([config])


def _describe_data(run: Run) -> list[str]:
    """Describe the documents of a run, the passes through them and the work of its rings, and warn of odd ones."""
    config = run.config
    data = run.train_data
    model = run.program.model
    shape = run.program.mesh.shape
    lines = []
    for store in data.stores:
        if earlier := describe_earlier(store, run.tokenizer):
            lines.append(earlier)
    lengths = data.document_lengths()
    lines += map(str, lengths)
    passes = data.passes(config.steps)
    for name, times in passes.items():
        lines.append(describe_passes(name, times, config.steps))
    if config.data.buckets:
        lines.append(data.describe_buckets())
    if getattr(model, "window", 0) <= 0:  # windows are not counted
        chunks = getattr(model, "q_chunk", None), getattr(model, "k_chunk", None)
        gathered = getattr(model, "ring", "") == "gathered"
        rows = config.batch_size // (config.accumulate * shape["dp"] * shape["fsdp"])  # of a device at once
        if balance := data.describe_balance(chunks, rows, gathered):
            lines.append(balance)
    for warning in (too_short(lengths), too_often(passes)):
        if warning:
            lines.append(f"warning: {warning}")
    return lines


def _schedule_before(config: Config, changes: Changes) -> optax.Schedule:
    """Return the learning rate by update of a run before its config changed."""
    names = {field.name for field in fields(config.optimizer)}
    optimizer = {}
    for key, (old, _) in changes.items():
        name = key.removeprefix("optimizer.")
        if key.startswith("optimizer.") and name in names:
            optimizer[name] = old
    steps, _ = changes.get("steps", (config.steps, config.steps))
    if steps is None:  # not recorded, the rate was constant
        steps = config.steps
    return schedule(replace(config.optimizer, **optimizer), steps)


def describe_adapters(config: Config) -> str:
    """Describe the adapters that train."""
    return f"adapters of rank {config.lora.rank}: {config.lora.num_params(config.model):,} parameters train"
