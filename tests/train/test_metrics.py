"""Boards beside metrics.jsonl, and the model's FLOPs by hand."""

import json
import sys
import types

import pytest

from ringformer.models.llama import LlamaConfig
from ringformer.models.presets import preset
from ringformer.train.config import Config, DataConfig, OptimizerConfig
from ringformer.train.metrics import Reporter, model_flops_per_token


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text('{"steps": 3}')
    return Config(
        model=LlamaConfig(**preset("tiny")), data=DataConfig(store="s"), optimizer=OptimizerConfig(warmup_steps=1),
        run_dir=str(tmp_path), steps=3, tensorboard=True, wandb="project",
    )  # fmt: skip


def report(config):
    reporter = Reporter(config.run_dir, 0, config)
    reporter.step(1, {"loss": 2.5, "tokens_per_second": 10.0})
    reporter.evaluation(1, {"eval_loss": 2.0})
    reporter.close()


def test_every_board_gets_every_value(config, tmp_path, monkeypatch):
    seen = []
    run = types.SimpleNamespace(log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("end"))
    begin = lambda **given: seen.append(given) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=begin))
    report(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.5, "tokens_per_second": 10.0}, {"step": 1, "eval_loss": 2.0}]
    assert seen[0] == dict(project="project", name=tmp_path.name, dir=str(tmp_path), config={"steps": 3})
    assert seen[1:] == [(1, {"loss": 2.5, "tokens_per_second": 10.0}), (1, {"eval_loss": 2.0}), "end"]
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_a_board_that_is_not_installed_is_named(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install wandb$"):
        report(config)


def test_model_flops_of_llama_7b():
    """6 N + 12 L H d T with N without the input embedding."""
    N = 6.738e9 - 32000 * 4096
    assert model_flops_per_token(LlamaConfig(**preset("llama_7b")), 2048) == pytest.approx(
        6 * N + 12 * 32 * 4096 * 2048, rel=1e-3
    )
