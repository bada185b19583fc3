"""A run whose every reported number is computed again, from the data and the parameters that it saved."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train import reports as step_reports
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.oracle import llama, packing
from tests.oracle.adamw import AdamW, global_norm
from tests.train.runs import MODEL, flatten, read_metrics, read_parameters, write_chats

SECONDS = 2.0
"""Each step's, by the clock of the run."""
ARCHITECTURE = llama.Architecture(MODEL.rope_theta, MODEL.norm_eps)


class Clocked:
    """A loader of whose batches each takes SECONDS."""

    def __init__(self, loader):
        self._loader, self.now = loader, 100.0

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def iterate(self, start, sharding):
        for batch in self._loader.iterate(start, sharding):
            self.now += SECONDS
            yield batch


@pytest.fixture
def config(tmp_path):
    """Chats, so that masks are uneven, with held-out sequences beside those that are evaluated."""
    write_chats(tmp_path / "chats.json")
    return Config(
        model=MODEL,
        data=DataConfig(
            store=str(tmp_path / "store"), source=f"json:{tmp_path}/chats.json", format="messages", held_out=0.5
        ),
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=1, final_fraction=0.3, clip_norm=0.5),
        run_dir=str(tmp_path / "run"),
        mesh_dim="2,2,2,1",
        seq_len=64,
        batch_size=8,
        accumulate=2,
        steps=3,
        seed=5,
        eval_every=2,
        eval_batches=3,
        checkpoint_every=1,
        keep_checkpoints=3,
    )


def step_numbers(c: Config, step: int, params: dict) -> dict:
    """What a run says of a step that begins with these parameters."""
    store, o = Path(c.data.store, "train"), c.optimizer
    rows = packing.batch(store, step - 1, c.batch_size, c.seq_len, c.seed)
    nats, gradients = llama.loss_and_gradients(params, rows, ARCHITECTURE)
    tokens = int(rows.mask.sum())
    adamw = AdamW(
        o.learning_rate,
        o.warmup_steps,
        c.steps,
        o.schedule,
        o.final_fraction,
        o.b1,
        o.b2,
        o.eps,
        o.weight_decay,
        o.clip_norm,
    )
    return {
        "step": step,
        "loss": nats / tokens,
        "grad_norm": global_norm(flatten(gradients)) / tokens,
        "learning_rate": adamw.rate(step),
        "trained_tokens": tokens,
        "masked_tokens": int((~rows.mask & ~rows.ends).sum()),
        "tokens_per_second": c.batch_size * c.seq_len / SECONDS,
    }


def evaluation_numbers(c: Config, step: int, params: dict) -> dict:
    """What a run says of held-out data with these parameters."""
    folder = Path(c.data.store, "eval")
    store = packing.read_store(folder)
    assert sum(map(len, store.documents)) > (c.eval_batches + 1) * c.batch_size * c.seq_len  # not all is evaluated
    buckets, means = {}, []
    for i in range(c.eval_batches):
        rows = packing.batch(folder, i, c.batch_size, c.seq_len, seed=0)
        losses = llama.losses(params, rows, ARCHITECTURE)
        means.append(losses.sum() / rows.mask.sum())
        for loss, position in zip(losses[rows.mask], rows.positions[rows.mask], strict=True):
            buckets.setdefault(len(f"{position:b}") if position else 0, []).append(loss)
    everything = np.concatenate(list(buckets.values()))
    loss = everything.mean()
    assert abs(np.mean(means) / loss - 1) > 1e-4  # the mean of batches is not that of tokens
    return {
        "step": step,
        "eval_loss": loss,
        "eval_perplexity": math.exp(loss),
        "eval_tokens": len(everything),
        "eval_bits_per_byte": loss / math.log(2) / store.bytes_per_token,
        "eval_by_position": [
            {"first": 2 ** (k - 1) if k else 0, "last": 2**k - 1, "tokens": len(x), "loss": np.mean(x)}
            for k, x in sorted(buckets.items())
        ],
    }


def test_every_number_of_a_run_follows_from_what_it_saved(config, monkeypatch):
    run = prepare(config)
    data = Clocked(run.train_data)
    monkeypatch.setattr(step_reports, "time", SimpleNamespace(perf_counter=lambda: data.now))
    train(run._replace(train_data=data))
    # The first step's learning rate is 0: what is saved after it is what the run began with.
    saved = [read_parameters(config.run_dir, step) for step in (1, 1, 2, 3)]
    expected = [evaluation_numbers(config, 0, saved[0])]
    for step in range(1, config.steps + 1):
        expected.append(step_numbers(config, step, saved[step - 1]))
        if step in (2, 3):
            expected.append(evaluation_numbers(config, step, saved[step]))
    lines = read_metrics(config.run_dir)
    assert len(lines) == len(expected)
    for line, numbers in zip(lines, expected, strict=True):
        positions, expected_positions = (x.pop("eval_by_position", []) for x in (line, numbers))
        assert line == pytest.approx(numbers, rel=1e-5)
        assert len(positions) == len(expected_positions)
        for bucket, expected_bucket in zip(positions, expected_positions, strict=True):
            assert bucket == pytest.approx(expected_bucket, rel=1e-5)
