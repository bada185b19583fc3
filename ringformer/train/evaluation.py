"""Evaluation on held-out data: the loss, and how it depends on the position."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ringformer.data import Loader
from ringformer.parallel.mesh import BATCH
from ringformer.runs.config import Config
from ringformer.train.step import make_eval_step


def count_batches(config: Config, data: Loader | None) -> int:
    """How many batches an evaluation takes; raises ValueError if the held-out data has none."""
    if data is None:
        return 0
    batches = min(config.eval_batches, data.sequences.per_epoch // data.batch_size)
    if batches == 0:
        raise ValueError(
            f"the held-out data has {data.sequences.per_epoch} sequences of {config.seq_len} tokens, fewer than "
            f"batch_size={data.batch_size}: raise data.held_out, or set it to 0 to train without evaluation"
        )
    return batches


def make_evaluation(
    config: Config, data: Loader | None, weights: dict, mesh: jax.sharding.Mesh
) -> Callable[..., dict[str, Any] | None] | None:
    """`evaluate(params, stop) -> metrics` over the first `eval_batches` of the held-out data, or None without any.

    eval_loss is in nats per trained token, all of eval_tokens weighing the same; eval_bits_per_byte is its equivalent
    per byte of text, comparable between tokenizers; eval_perplexity is its exponential. eval_by_position has the loss
    of the tokens at RoPE positions `first` to `last`, a power of two each: whether the far context helps. Without a
    trained token there is eval_tokens = 0 alone.

    `stop()` is asked before each batch; the result is None if it said yes.

    Raises FloatingPointError for a loss that is not finite.
    """
    batches = count_batches(config, data)
    if data is None:
        return None
    step = make_eval_step(config.model, weights, mesh, seq_len=config.seq_len, accumulate=config.accumulate)
    sharding = NamedSharding(mesh, BATCH)

    def evaluate(params, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        sums, pending = [], None
        for i in range(batches):
            if stop():
                return None
            enqueued = step(params, data.batch(i, sharding))
            if pending:  # a batch behind, and no further: what is enqueued holds its batch, and its collectives wait
                sums.append(jax.device_get(pending))
            pending = enqueued
        sums.append(jax.device_get(pending))
        nats, tokens = (np.stack(column).sum(axis=0, dtype=np.float64) for column in zip(*sums, strict=True))
        return _metrics(nats, tokens, data.sequences.bytes_per_token)

    return evaluate


def _metrics(nats: np.ndarray, tokens: np.ndarray, bytes_per_token: float) -> dict[str, Any]:
    """The metrics of an evaluation, from its sums in each position bucket."""
    if not tokens.sum():
        return {"eval_tokens": 0}
    loss = float(nats.sum() / tokens.sum())
    if not math.isfinite(loss):
        raise FloatingPointError(f"the held-out loss is {loss}: nothing is reported or saved of these parameters")
    return {
        "eval_loss": loss,
        "eval_bits_per_byte": loss / math.log(2) / bytes_per_token,
        "eval_perplexity": math.exp(min(loss, 700.0)),
        "eval_tokens": int(tokens.sum()),
        "eval_by_position": [
            {"first": 2**k // 2, "last": 2**k - 1, "tokens": int(t), "loss": float(n / t)}
            for k, (n, t) in enumerate(zip(nats, tokens, strict=True))
            if t
        ],
    }
