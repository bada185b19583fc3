"""Evaluation: what it says is of all trained held-out tokens alike, by position too; it fits where training does."""

import math

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding

from ringformer.data import Batch
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.processes.stopping import StopReason
from ringformer.runs.config import OptimizerConfig
from ringformer.train import evaluation, step
from ringformer.train.evaluation import evaluate
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import init_state, state_shardings
from ringformer.train.step import make_eval_step, make_logits, position_bucket
from tests.helpers import packed_segments

MODEL = LlamaConfig(
    vocab_size=31,
    hidden_size=20,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    compute_dtype="float32",
    loss_chunk=8,
)
SEQ_LEN = 32


class HeldOut:
    """Batches of random tokens of packed documents, each with a mask of its own weight, as a Loader gives them."""

    def __init__(self, mesh, batch_size, count, trained=True):
        self.batch_size, self.seq_len, self.sequences = batch_size, SEQ_LEN, self
        self.per_epoch, self.bytes_per_token = count * batch_size, 3.0
        self._mesh, self._trained, self.live, self.most = mesh, trained, 0, 0

    def rows(self, i):
        rng = np.random.default_rng(i)
        shape = self.batch_size, SEQ_LEN
        segments = packed_segments(i, *shape, documents=3)
        starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1, axis=1), np.arange(SEQ_LEN), 0), axis=1)
        ends = np.diff(segments, append=-1, axis=1) != 0
        mask = ~ends & (rng.random(shape) < (i + 1) / 5) & self._trained
        return Batch(
            tokens=rng.integers(0, 31, shape, np.int32),
            targets=rng.integers(0, 31, shape, np.int32),
            positions=(np.arange(SEQ_LEN) - starts).astype(np.int32),
            segment_ids=segments,
            mask=mask,
            ends=ends,
        )

    def batch(self, i, sharding):
        order = permutation(MODEL.layout, SEQ_LEN, self._mesh.shape["sp"])
        return jax.device_put(jax.tree.map(lambda x: x[:, order], self.rows(i)), sharding)


@pytest.fixture(scope="module")
def params():
    mesh = make_mesh("1,2,1,4")
    optimizer = make_optimizer(OptimizerConfig(), 10, abstract_model(MODEL)[2])
    return init_state(MODEL, optimizer, state_shardings(weight_shardings(MODEL, mesh), optimizer), mesh, 0).params


@pytest.mark.usual("1")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_evaluation_weighs_every_trained_token_alike(params, accumulate):
    """Against the logits: their cross-entropy, summed here over all batches, and over each power of two."""
    mesh = make_mesh("1,2,1,4")
    weights, data = weight_shardings(MODEL, mesh), HeldOut(mesh, 4, 5)
    eval_step = make_eval_step(MODEL, weights, mesh, seq_len=SEQ_LEN, accumulate=accumulate)
    found = evaluate(eval_step, params, data, 3, NamedSharding(mesh, BATCH))
    logits, order = make_logits(MODEL, weights, mesh), np.argsort(permutation(MODEL.layout, SEQ_LEN, 4))
    losses, positions = [], []
    for i in range(3):  # eval_batches of the five that there are
        rows = data.rows(i)
        batch = data.batch(i, NamedSharding(mesh, BATCH))
        x = np.asarray(logits(params, batch), np.float64)[:, order]
        lse = np.log(np.exp(x).sum(-1))
        token = lse - np.take_along_axis(x, rows.targets[..., None], -1)[..., 0]
        losses.append(token[rows.mask])
        positions.append(rows.positions[rows.mask])
    losses, positions = np.concatenate(losses), np.concatenate(positions)
    assert found["eval_tokens"] == len(losses)
    assert found["eval_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found["eval_bits_per_byte"] == pytest.approx(losses.mean() / math.log(2) / 3.0, rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert [(row["first"], row["last"]) for row in found["eval_by_position"]] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
    ]
    for row in found["eval_by_position"]:
        there = (positions >= row["first"]) & (positions <= row["last"])
        assert row["tokens"] == there.sum()
        assert row["loss"] == pytest.approx(losses[there].mean(), rel=1e-5)


def test_buckets_are_powers_of_two():
    positions = np.array([0, 1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20, 2**31 - 1], np.int32)
    expected = [0, 1, 2, 2, 3, 3, 4, 20, 21, 31]
    assert position_bucket(positions).tolist() == expected == [int(p).bit_length() for p in positions]


def test_no_more_than_two_batches_are_enqueued(monkeypatch):
    """Sixty-four at once, and the collectives of eight simulated devices give up waiting for each other."""
    mesh, live = make_mesh("1,2,1,4"), []
    most = 0

    class Pending:
        def __array__(self, *_, **__):
            live.remove(self)
            return np.ones(6)

    def enqueue(params, batch):
        nonlocal most
        live.append(Pending())
        most = max(most, len(live))
        return live[-1], np.ones(6)

    monkeypatch.setattr(evaluation.jax, "device_get", lambda pair: tuple(np.asarray(x) for x in pair))
    data = HeldOut(mesh, 4, 64)
    data.batch = lambda i, sharding: None
    found = evaluate(enqueue, {}, data, 64, None)
    assert most == 2 and not live and found["eval_tokens"] == 64 * 6


def test_held_out_batches_without_a_trained_token_divide_nothing():
    mesh = make_mesh("1,2,1,4")

    def nothing(*_):
        return np.zeros(6), np.zeros(6, int)

    data = HeldOut(mesh, 4, 3)
    data.batch = lambda i, sharding: None
    assert evaluate(nothing, {}, data, 3, None) == {"eval_tokens": 0}
    assert evaluate(nothing, {}, data, 3, None, stop=lambda: StopReason.by_signal(15)) is None


def test_a_loss_that_is_not_finite_is_not_reported():
    mesh = make_mesh("1,2,1,4")
    sums = np.array([np.nan, 1.0]), np.array([1, 1])
    data = HeldOut(mesh, 4, 3)
    data.batch = lambda i, sharding: None
    with pytest.raises(FloatingPointError, match="the held-out loss is nan"):
        evaluate(lambda *_: sums, {}, data, 3, None)


def test_microbatches_take_the_memory_of_one():
    """A batch's activations must not be there at once, or evaluation runs out of memory where training fits."""
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    weights = weight_shardings(MODEL, mesh)
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.padded_shape, np.float32), weights)
    batch = HeldOut(mesh, 16, 1).batch(0, NamedSharding(mesh, BATCH))
    at_once, in_turn = (
        make_eval_step(MODEL, weights, mesh, seq_len=SEQ_LEN, accumulate=n)
        .lower(params, batch)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for n in (1, 16)
    )
    assert in_turn < 0.25 * at_once


def test_the_compiled_step_gets_the_compilers_options(params, monkeypatch):
    mesh = make_mesh("1,2,1,4")
    monkeypatch.setattr(step, "compiler_options", lambda mesh, training: {"xla_no_such_option": "1"})
    eval_step = make_eval_step(MODEL, weight_shardings(MODEL, mesh), mesh, seq_len=SEQ_LEN)
    batch = HeldOut(mesh, 4, 1).batch(0, NamedSharding(mesh, BATCH))
    with pytest.raises(JaxRuntimeError, match="xla_no_such_option"):
        eval_step(params, batch)
