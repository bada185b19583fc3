"""A run whose every reported number is computed again, from the data and the parameters that it saved."""

import dataclasses
import math
import re
import struct
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from ringformer.hardware import CHIPS
from ringformer.runs import step_clock
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train import reports as step_reports
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.oracle import llama, packing
from tests.oracle.adamw import AdamW, global_norm
from tests.train.runs import MODEL, first_parameters, flatten, read_metrics, read_parameters, write_chats

SECONDS = 2.0
"""Each step's, by the clock of the run."""
FIELDS = {
    *("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu_palm", "peak_memory_gib"),
    *("trained_tokens", "masked_tokens"),
    *("eval_loss", "eval_bits_per_byte", "eval_perplexity", "eval_tokens", "eval_loss_to_N"),
}
"""Rows that boards get from a run on chats."""
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


def ended_at(moment):
    """The end of a step: here the moment at which its batch had been loaded."""
    ended = Future()
    ended.set_result(moment)
    return ended


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
    monkeypatch.setattr(step_clock, "end_of", lambda metrics: ended_at(data.now))
    train(run._replace(train_data=data))
    first = first_parameters(config.model, config.seed)
    saved = [first, *(read_parameters(config.run_dir, step) for step in (1, 2, 3))]
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


def events(run_dir: str) -> dict[int, dict[str, float]]:
    """The scalars of the event files, by step."""
    (path,) = Path(run_dir).glob("events.out.tfevents*")
    data, place, scalars = path.read_bytes(), 0, {}
    while place < len(data):  # of each record: length, checksum, content, checksum
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        place += 16 + length
        for value in event.summary.value:
            assert value.tag not in scalars.setdefault(event.step, {})
            scalars[event.step][value.tag] = value.simple_value
    return scalars


@pytest.mark.usual("devices that count")
@pytest.mark.parametrize("peaks", [True, False], ids=["devices that count", "devices that do not"])
def test_boards_have_every_field(config, monkeypatch, peaks):
    """Memory is that of the device that used most, and absent where it is not counted."""
    sent = []
    board = SimpleNamespace(log=lambda values, step: sent.append((step, values)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: board))
    monkeypatch.setattr(step_reports, "chip_of", lambda kind: CHIPS["H100"])
    if peaks:
        count = {"bytes_in_use": 2**20, "peak_bytes_in_use": 0}
        used = lambda device: count | {"peak_bytes_in_use": (8 - device.id) * 2**28}  # noqa: E731
        monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", used)
    config = dataclasses.replace(config, tensorboard=True, wandb="project", steps=2)
    train(prepare(config))
    rows = read_metrics(config.run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    for row, (step, values) in zip(rows, sent, strict=True):
        by_position = row.pop("eval_by_position", [])
        assert {"step": step, **values} == row | {f"eval_loss_to_{x['last']}": x["loss"] for x in by_position}
        assert row.get("peak_memory_gib") == (2.0 if peaks and "loss" in row else None)
        assert ("mfu_palm" in row) == ("loss" in row)
    by_step = {step: dict(x for s, values in sent if s == step for x in values.items()) for step, _ in sent}
    assert events(config.run_dir) == {step: pytest.approx(values, rel=1e-6) for step, values in by_step.items()}
    fields = {re.sub(r"_to_\d+", "_to_N", name) for _, values in sent for name in values}
    assert fields == FIELDS - (set() if peaks else {"peak_memory_gib"})


def test_every_field_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "train.md").read_text()
    table = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == FIELDS
