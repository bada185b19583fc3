"""A failure of the host between two steps loses no step: the state is saved, and the same command goes on."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from ringformer.checkpoints.saved_model import latest_step
from ringformer.cli import main
from ringformer.processes.stopping import FAILED, STOPPED, Stopped
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.runs.metrics import Reporter
from ringformer.train import evaluation as evaluation_module
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from ringformer.train.saving import Saving
from tests.train.runs import MODEL, read_metrics

FAILS_AT = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for number in range(30):
        words = rng.choice(["ring", "block", "key", "query", "value"], rng.integers(5, 200))
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def config(corpus, tmp_path):
    """Nothing is due to be saved before the last step."""
    return Config(
        model=MODEL,
        data=DataConfig(store=str(tmp_path / "store"), source=f"text:{corpus}/*.txt", held_out=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        run_dir=str(tmp_path / "run"),
        mesh_dim="8,1,1,1",
        seq_len=64,
        batch_size=8,
        steps=8,
        checkpoint_every=1000,
        checkpoint_minutes=0,
        eval_every=1000,
        eval_batches=1,
    )


class HostFailure(RuntimeError):
    """An error that ringformer does not raise."""


def broken_report(context, error):
    """Have the report of a step fail, once its successor is handed to the devices."""
    report = Reporter.step

    def fails(self, step, values):
        if step == FAILS_AT - 1:
            raise error
        report(self, step, values)

    context.setattr(Reporter, "step", fails)


def broken_input(context, error):
    """Have the batch of step 6 fail."""
    read = Saving.reading

    def fails(self, state, step):
        if step == FAILS_AT:
            raise error
        return read(self, state, step)

    context.setattr(Saving, "reading", fails)


def broken_evaluation(context, error):
    evaluate = evaluation_module.evaluate
    calls = []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) == 2:  # the first is of step 0
            raise error
        return evaluate(*args, **options)

    context.setattr(evaluation_module, "evaluate", fails)


def fail(error):
    raise error


BREAKS = [broken_report, broken_input, broken_evaluation]


@pytest.mark.slow
@pytest.mark.parametrize("break_host", BREAKS)
def test_no_step_is_lost(config, monkeypatch, tmp_path, break_host):
    """The run goes on, and ends as one that nothing interrupted, bit for bit."""
    if break_host is broken_evaluation:
        config = dataclasses.replace(config, eval_every=FAILS_AT)
    whole = train(prepare(dataclasses.replace(config, run_dir=str(tmp_path / "whole"))))
    with monkeypatch.context() as context:
        break_host(context, HostFailure("the host's\nsecond line"))
        with pytest.raises(Stopped, match=rf"the host failed after step {FAILS_AT} \(") as stopped:
            train(prepare(config))
    said = str(stopped.value)
    assert stopped.value.code == STOPPED and "HostFailure: the host's; " in said and "\n" not in said
    assert f"stopped at step {FAILS_AT} of 8, which is saved in" in said and said.endswith("resumes the run")
    assert latest_step(config.run_dir) == FAILS_AT
    record = json.loads(Path(config.run_dir, "host_failure.json").read_text())
    assert record["step"] == FAILS_AT and any("test_host_failure.py" in line for line in record["traceback"])
    resumed = train(prepare(config))
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed.params, whole.params))
    lost = {FAILS_AT - 1} if break_host is broken_report else set()
    reported = [row["step"] for row in read_metrics(config.run_dir) if "learning_rate" in row]
    assert reported == sorted(set(range(1, 9)) - lost)


def test_the_same_error_at_the_same_step_is_not_started_again(config, monkeypatch):
    """Another error is."""
    codes = []
    for text in ("first", "first", "second"):
        with monkeypatch.context() as context:
            broken_input(context, HostFailure(text))
            with pytest.raises(Stopped) as stopped:
                train(prepare(config))
        codes.append(stopped.value.code)
        assert latest_step(config.run_dir) == FAILS_AT
    assert codes == [STOPPED, FAILED, STOPPED]


@pytest.mark.slow
def test_a_refusal_is_raised_as_it_is(config, monkeypatch):
    """Its state is saved; a launcher that started it again would only be refused again."""
    with monkeypatch.context() as context:
        broken_input(context, ValueError("the store has no token to train on"))
        with pytest.raises(ValueError, match="no token to train on"):
            train(prepare(config))
    assert latest_step(config.run_dir) == FAILS_AT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diverged", "the step", "the save"])
def test_what_is_not_saved(config, monkeypatch, kind):
    """A run that diverged, a step that failed with its state, and one whose save fails."""
    error = FloatingPointError("not finite") if kind == "diverged" else OSError(28, "No space left on device")
    with monkeypatch.context() as context:
        if kind == "the step":
            run = prepare(config)

            context.setattr(type(run.program), "step_on", lambda *_: lambda *_: fail(error))
            with pytest.raises(OSError, match="No space left"):
                train(run)
        elif kind == "diverged":
            broken_report(context, error)
            with pytest.raises(FloatingPointError):
                train(prepare(config))
        else:
            broken_input(context, HostFailure("no network"))
            context.setattr("ringformer.runs.folder.RunFolder.save", lambda *_: fail(error))
            with pytest.raises(HostFailure) as raised:
                train(prepare(config))
            (note,) = raised.value.__notes__
            assert note == f"the state of step {FAILS_AT} could not be saved either: {error}"
    assert latest_step(config.run_dir) is None


CONFIG = """
from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.model.num_layers = 1
    config.data.tokenizer = "bytes"
    config.seq_len = 64
    config.batch_size = 8
    config.steps = 8
    config.mesh_dim = "8,1,1,1"
    config.optimizer.warmup_steps = 2
    config.eval_every = 0
    config.checkpoint_minutes = 0.0
    return config
"""


@pytest.mark.slow
def test_the_command_names_the_failure_and_launchers_start_it_again(config, monkeypatch, capsys, tmp_path):
    """Exit code 75, and one line."""
    (tmp_path / "config.py").write_text(CONFIG)
    words = ["train", f"--config={tmp_path / 'config.py'}", f"--config.run_dir={config.run_dir}"]
    words += [f"--config.data.store={config.data.store}", f"--config.data.source={config.data.source}"]
    broken_input(monkeypatch, HostFailure("no network"))
    assert main(words) == STOPPED
    error = capsys.readouterr().err
    line = f"ringformer train: the host failed after step {FAILS_AT} ({__name__}.HostFailure: no network;"
    assert line in error and "the same command resumes the run" in error and "Traceback" not in error
