"""What a step's metrics become: rows of the reporter, one step late."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.checkpoints.retention import Keep
from ringformer.hardware import chip_of
from ringformer.models.registry import flops_per_token
from ringformer.runs.metrics import Reporter
from ringformer.train.checks import BatchWatch
from ringformer.train.optimizer import schedule
from ringformer.train.prepare import Run
from ringformer.train.skipped_steps import SkippedSteps


class StepReports:
    """The metrics of steps, checked and handed to the reporter one step late, so that the devices never wait for it."""

    def __init__(self, run: Run, reporter: Reporter, told: Mapping[str, Any], keep: Keep):
        """
        Args:
          told: what `told` said when the step was saved that the run goes on from.
          keep: what hears of each step's loss.
        """
        config = run.config
        self._keep = keep
        self._watch = BatchWatch(chats=run.train_data.sequences.masked)
        self._chats, self._reporter = run.train_data.sequences.masked, reporter
        self._rate = schedule(config.optimizer, config.steps)
        self._skipped = SkippedSteps(config, run.train_data, reporter.history, told)
        self._everywhere = NamedSharding(run.mesh, P())
        self._tokens = config.batch_size * config.seq_len
        chip = chip_of(run.mesh.devices.flat[0].device_kind)
        flops = flops_per_token(config.model, config.seq_len)
        self._mfu_per_rate = flops / (chip.bf16_flops * run.mesh.size) if chip and flops else None
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._last = time.perf_counter()

    def told(self) -> dict[str, Any]:
        """What another start has to know of the steps that are reported: those skipped, the usual norms, the losses."""
        return self._skipped.told() | self._keep.told()

    def largest_norm(self, step: int) -> tuple[jax.Array, ...]:
        """What the train step takes beside state and batch: with `skip_spikes` the largest norm, else nothing."""
        limit = self._skipped.largest_norm(step)
        if limit is None:
            return ()
        return (jax.make_array_from_callback((), self._everywhere, lambda _: np.float32(limit)),)

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
        for line in (*self._watch.summary(steps), *self._skipped.summary()):
            self._reporter.say(line)

    def _report(self, step, metrics):
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        values = {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "learning_rate": float(self._rate(self._skipped.updates_before(step))),
            "trained_tokens": int(metrics["tokens"]),
            "masked_tokens": int(metrics["masked"]),
            "tokens_per_second": self._tokens / seconds,
        }
        if self._mfu_per_rate:
            values["mfu"] = self._mfu_per_rate * values["tokens_per_second"]
        said = self._watch.see(step, values)
        if not values["trained_tokens"]:
            del values["loss"]  # it is of no token
        if not self._chats:
            del values["masked_tokens"]
        skipped = self._skipped.see(step, metrics)
        if skipped or "loss" in values:
            self._keep.see(step, None if skipped else values["loss"])
        if skipped:
            values = {k: v for k, v in values.items() if np.isfinite(v)} | skipped
            said.append(f"step {step} is skipped: {skipped['skipped']}; its batch: {skipped['batch']}")
        self._reporter.step(step, values)
        for line in said:
            self._reporter.say(line)
        self._skipped.check(step)
