"""Evaluation on held-out data: the loss, and its dependence on the position."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ringformer.data import Loader
from ringformer.models.registry import family_with
from ringformer.processes.stopping import Phase, Stopping, StopReason
from ringformer.runs.folder import RunFolder
from ringformer.train.checks import count_batches
from ringformer.train.prepare import Run
from ringformer.train.reports import StepReports
from ringformer.train.saving import Saving
from ringformer.train.state import TrainState, check_state_finite


def evaluate(
    eval_step: Callable[..., Any],
    params: Any,
    data: Loader,
    eval_batches: int,
    sharding: NamedSharding,
    stop: Callable[[], StopReason | None] = lambda: None,
    likelihood: bool = True,
) -> dict[str, Any] | None:
    """Evaluate parameters on the first `eval_batches` batches of the held-out data and return the metrics.

    eval_loss is the mean loss, in nats, of the eval_tokens tokens that are trained on. eval_bits_per_byte is this loss
    in bits per byte of text, which is comparable between tokenizers. eval_perplexity is the exponential of eval_loss.
    eval_by_position has the loss of the tokens at RoPE positions `first` to `last`, for one range per power of two: it
    shows whether distant context helps. If no token is trained on, eval_tokens = 0 is the only metric. Without
    `likelihood`, losses are in the model's own unit, and there are neither bits nor perplexity.

    Args:
      eval_step: result of `make_eval_step`.
      sharding: sharding of a batch's arrays.
      stop: called before each batch; if it returns a reason, the evaluation ends and the result is None.
      likelihood: True if losses are -log p(target) (`registry.Family`).

    Raises FloatingPointError for a loss that is not finite.
    """
    sums = []
    pending = None
    for i in range(count_batches(eval_batches, data)):
        if stop():
            return None
        enqueued = eval_step(params, data.batch(i, sharding))
        if pending:  # only one batch behind: an enqueued step holds its batch, and its collectives wait
            sums.append(jax.device_get(pending))
        pending = enqueued
    sums.append(jax.device_get(pending))
    columns = zip(*sums, strict=True)
    nats, tokens = (np.stack(column).sum(axis=0, dtype=np.float64) for column in columns)
    return _metrics(nats, tokens, data.sequences.bytes_per_token if likelihood else None)


class Evaluation:
    """Evaluations of a run on its held-out data, at the steps that its config determines."""

    def __init__(
        self,
        run: Run,
        frozen: list[dict[str, Any]],
        data: Loader,
        folder: RunFolder,
        reports: StepReports,
        saving: Saving,
        stopping: Stopping,
    ):
        self._run = run
        self._frozen = frozen
        self._data = data
        self._start = folder.start or 0
        self._folder = folder
        self._reports = reports
        self._saving = saving
        self._stopping = stopping

    def run_if_due(self, state: TrainState, step: int) -> None:
        """Evaluate and report the state of `step` if it is step 0, the last step, or a multiple of `eval_every`.

        An evaluation that finished before an interruption is not repeated. A stop ends an evaluation without a report.

        Raises FloatingPointError for a state that is not finite.
        """
        config = self._run.config
        program = self._run.program
        first = step == self._start
        due = step in (0, config.steps) or (config.eval_every > 0 and step % config.eval_every == 0)
        if not due or (first and self._reports.evaluated(step)):
            return
        if not first:
            self._reports.flush()
            check_state_finite(state, f"after step {step}")
        self._stopping.enter(Phase.EVALUATION, step)
        with self._saving.reading(state, step):
            values = evaluate(
                program.eval_step,
                program.weights(state.params, self._frozen),
                self._data,
                config.eval_batches,
                program.batch_sharding,
                stop=self._stopping.due,
                likelihood=family_with(type(config.model)).likelihood,
            )
        if values:
            self._reports.evaluation(step, values)
            if "eval_loss" in values:
                self._folder.keep.losses[step] = values["eval_loss"]


def _metrics(nats: np.ndarray, tokens: np.ndarray, bytes_per_token: float | None) -> dict[str, Any]:
    """Return the metrics of an evaluation, from its sums in each position bucket; None: losses are not -log p."""
    if not tokens.sum():
        return {"eval_tokens": 0}
    loss = float(nats.sum() / tokens.sum())
    if not math.isfinite(loss):
        raise FloatingPointError(f"the held-out loss is {loss}: it is not reported, and these parameters are not saved")
    metrics: dict[str, Any] = {"eval_loss": loss}
    if bytes_per_token is not None:
        metrics["eval_bits_per_byte"] = loss / math.log(2) / bytes_per_token
        metrics["eval_perplexity"] = math.exp(min(loss, 700.0))
    metrics["eval_tokens"] = int(tokens.sum())
    metrics["eval_by_position"] = []
    for k, (n, t) in enumerate(zip(nats, tokens, strict=True)):
        if t:
            bucket = {"first": 2**k // 2, "last": 2**k - 1, "tokens": int(t), "loss": float(n / t)}
            metrics["eval_by_position"].append(bucket)
    return metrics
