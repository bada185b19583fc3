"""A family that reads features beside tokens, and whose losses are no likelihood, trains over the ring."""

import json

import jax
import numpy as np
import pytest

from ringformer.estimate.workloads.programs import TRAIN_STEP, lower_program
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.interface import Feature, Features
from ringformer.models.registry import Family, register
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.helpers import relative_error
from tests.models.bits import FEATURES, Bits, BitsConfig, bits_of
from tests.train.runs import read_metrics


def run_config(folder, name: str, mesh_dim: str, **changes):
    rows = [{"text": f"{i} blocks of keys and values travel around the ring "} for i in range(600)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = base_config("bits")
    values.update({"seq_len": 64, "batch_size": 16, "steps": 12, "accumulate": 2, "eval_batches": 1})
    values.update({"mesh_dim": mesh_dim, "run_dir": str(folder / name)} | changes)
    values.data.update({"store": str(folder / "store"), "source": f"jsonl:{folder}/rows.jsonl", "held_out": 0.1})
    values.optimizer.learning_rate = 2e-2
    return parse(values)


def test_features_train_on_a_ring_as_without(tmp_path):
    """Two microbatches, whose features must stay those of their tokens; metrics of an evaluation without bits."""
    for name, mesh_dim in ("alone", "8,1,1,1"), ("ring", "1,2,1,4"):
        train(prepare(run_config(tmp_path, name, mesh_dim)))
    alone, ring = (read_metrics(tmp_path / name) for name in ("alone", "ring"))
    losses = np.array([[row["loss"] for row in rows if "loss" in row] for rows in (alone, ring)])
    assert losses.shape == (2, 12) and relative_error(losses[1], losses[0]) < 1e-5
    assert losses[0, -1] < losses[0, 0] / 2
    evaluations = [row for row in ring if "eval_loss" in row]
    assert evaluations and all({"eval_perplexity", "eval_bits_per_byte"}.isdisjoint(row) for row in evaluations)


def test_microbatches_keep_the_features_of_their_tokens(tmp_path):
    """Loss of the first step: computed by hand from the batch and the initial parameters."""
    run = prepare(run_config(tmp_path, "run", "1,1,1,8"))
    state = run.first_state()
    batch = run.train_data.batch(0, run.program.batch_sharding)
    np.testing.assert_array_equal(batch.features["bits"], bits_of(np.asarray(batch.tokens)))
    assert batch.features["next_bits"].shape == (16, 64, 8)
    once = prepare(run_config(tmp_path, "once", "1,1,1,8", accumulate=1))
    expected = once.program.step(once.first_state(), batch)[1]
    actual = run.program.step(state, batch)[1]
    for name in ("loss", "grad_norm"):
        assert relative_error(np.asarray(actual[name]), np.asarray(expected[name])) < 1e-6


@pytest.mark.slow
def test_an_estimate_has_the_features():
    """Compiled for TPUs that are not there."""
    workload = Workload(BitsConfig(), find_target("v5e-8"), "1,1,1,8", seq_len=1024)
    program = lower_program(workload, TRAIN_STEP)
    shapes = sorted(x.shape for x in jax.tree.leaves(program.lowered.in_avals) if x.ndim == 3)
    assert shapes == [(1, 1024, 8)] * 2
    assert program.lowered.compile(compiler_options=program.options).memory_analysis() is not None


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (5, r"features=5 must be Features"),
        (Features({"x": "int32"}, FEATURES.read), r"must be Features\({name: Feature"),
        (Features({"x": Feature("int64")}, FEATURES.read), "'x' has dtype='int64', .*devices would hold int32"),
        (Features({"x": Feature("float64")}, FEATURES.read), "devices would hold float32"),
        (Features({"x": Feature("int33")}, FEATURES.read), "'x' has dtype='int33', must be one of JAX, as text$"),
        (Features({"x": Feature(np.float32)}, FEATURES.read), "as text; devices would hold float32"),
    ],
)
def test_features_that_no_device_holds_are_refused(features, message):
    with pytest.raises(ValueError, match=message):
        register("wrong", Family(BitsConfig, Bits, {}, features=features))


def test_features_are_a_dict():
    with pytest.raises(ValueError, match="the family read list as features, must be a dict of arrays"):
        FEATURES.check([1, 2], (1, 8))


@pytest.mark.parametrize(
    "read",
    [
        lambda batch: {"bits": bits_of(batch.tokens)},
        lambda batch: FEATURES.read(batch) | {"bits": bits_of(batch.tokens).astype(np.float64)},
        lambda batch: FEATURES.read(batch) | {"bits": bits_of(batch.tokens)[:, :-1]},
    ],
)
def test_other_features_than_declared_are_refused(tmp_path, monkeypatch, read):
    monkeypatch.setattr(
        "ringformer.train.prepare.family_with",
        lambda config: Family(None, None, {}, features=Features(FEATURES.fields, read)),
    )
    run = prepare(run_config(tmp_path, "run", "1,1,1,8"))
    with pytest.raises(ValueError, match="the family's batches have the features"):
        run.train_data.batch(0, run.program.batch_sharding)
