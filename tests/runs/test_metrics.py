"""Boards beside metrics.jsonl."""

import dataclasses
import json
import sys
import types

import pytest

from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.runs import boards
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.runs.metrics import Reporter, read_metrics

EVALUATION = {
    "eval_loss": 2.0,
    "eval_tokens": 7,
    "eval_by_position": [
        {"first": 1, "last": 1, "tokens": 2, "loss": 3.0},
        {"first": 2, "last": 3, "tokens": 5, "loss": 1.5},
    ],
}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text('{"steps": 3}')
    return Config(
        model=LlamaConfig(**preset("tiny")),
        data=DataConfig(store="s"),
        optimizer=OptimizerConfig(warmup_steps=1),
        run_dir=str(tmp_path),
        steps=3,
        tensorboard=True,
        wandb="project",
    )


def report(config):
    reporter = Reporter(config.run_dir, 0, config)
    reporter.step(1, {"loss": 2.5, "tokens_per_second": 10.0})
    reporter.evaluation(1, EVALUATION)
    reporter.close()


def test_every_board_gets_every_value(config, tmp_path, monkeypatch):
    seen = []
    run = types.SimpleNamespace(log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("end"))
    begin = lambda **given: seen.append(given) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=begin))
    report(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.5, "tokens_per_second": 10.0}, {"step": 1, **EVALUATION}]
    numbers = {"eval_loss": 2.0, "eval_tokens": 7, "eval_loss_to_1": 3.0, "eval_loss_to_3": 1.5}
    kept = (tmp_path / "wandb_id").read_text()
    begun = dict(project="project", name=tmp_path.name, dir=str(tmp_path), config={"steps": 3}, id=kept, resume="allow")
    assert seen[0] == begun and len(kept) == 32
    assert seen[1:] == [(1, {"loss": 2.5, "tokens_per_second": 10.0}), (1, numbers), "end"]
    assert list(tmp_path.glob("events.out.tfevents*"))
    report(config)
    assert seen[4] == begun, "resumed, it is the same run there"


def test_a_board_that_is_not_installed_is_named(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install wandb$"):
        report(config)


class FailingBoard:
    """A board of Weights & Biases whose calls raise while `broken` names them."""

    def __init__(self):
        self.broken = set()
        self.steps = []
        self.asked = 0
        self.opened = 0
        self.ended = False

    def init(self, **_):
        self._may_raise("init")
        self.opened += 1
        return types.SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, values, step):
        self.asked += 1
        self._may_raise("log")
        self.steps.append(step)

    def finish(self):
        self._may_raise("finish")
        self.ended = True

    def _may_raise(self, name):
        if name in self.broken:
            raise RuntimeError(f"{name} has no network\nand more lines")


@pytest.fixture
def failing(config, monkeypatch):
    """The board, and a function that reports steps, while the clock goes on by the seconds of each."""
    board = FailingBoard()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=board.init))
    clock = [1000.0]
    monkeypatch.setattr(boards.time, "monotonic", lambda: clock[0])

    def steps(reporter, numbers, seconds):
        for step in numbers:
            clock[0] += seconds
            reporter.step(step, {"loss": 2.5, "tokens_per_second": 10.0})

    return board, steps


@pytest.mark.parametrize("call", ["init", "log"])
def test_a_board_that_fails_is_told_once_and_gets_its_rows_later(config, tmp_path, failing, capfd, call):
    board, steps = failing
    board.broken = {call}
    reporter = Reporter(config.run_dir, 0, dataclasses.replace(config, tensorboard=False, steps=20))
    steps(reporter, range(1, 5), 20.0)
    assert board.steps == []
    board.broken = set()
    steps(reporter, range(5, 10), 60.0)
    reporter.close()
    assert board.steps == list(range(1, 10)) and board.ended and board.opened == 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 10))
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert warnings == [
        f"warning: Weights & Biases fails (RuntimeError: {call} has no network): the run goes on, metrics.jsonl has "
        "the rows, and Weights & Biases is tried again"
    ]


def test_a_board_that_fails_is_not_asked_at_every_step(config, failing):
    """A request may wait for a minute: trials become rarer."""
    board, steps = failing
    board.broken = {"log"}
    reporter = Reporter(config.run_dir, 0, dataclasses.replace(config, tensorboard=False, steps=1000))
    steps(reporter, range(1, 1001), 1.0)
    assert 5 <= board.asked <= 9  # pauses of 10, 20, 40 ... 600 s in 1,000 s
    reporter.close()


def test_a_board_that_never_works_ends_no_run(config, tmp_path, failing, capfd):
    board, steps = failing
    board.broken = {"log", "finish"}
    reporter = Reporter(config.run_dir, 0, dataclasses.replace(config, tensorboard=False, steps=20))
    steps(reporter, range(1, 5), 1.0)
    reporter.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    error = capfd.readouterr().err
    assert "warning: Weights & Biases lacks 4 rows, from step 1 on: metrics.jsonl has them" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "\0\0", '{"step": 2', "2", "[]", '{"loss": 1}', '{"step": 1e999}'])
def test_a_torn_last_line_is_no_row_and_no_obstacle(config, tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": 2.0}}\n{torn}')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    reporter = Reporter(config.run_dir, 1, dataclasses.replace(config, wandb="", tensorboard=False))
    reporter.step(2, {"loss": 1.5, "tokens_per_second": 1.0})
    reporter.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert not (tmp_path / "metrics.part").exists()


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a row of metrics"):
        read_metrics(path)


def test_evaluations_that_are_there_are_known(config, tmp_path):
    plain = dataclasses.replace(config, wandb="", tensorboard=False)
    for step in (0, 2):
        (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 2, "eval_tokens": 5}\n')
        reporter = Reporter(config.run_dir, step, plain)
        assert reporter.evaluated(2) == (step == 2), "at step 0 all begins anew"
        reporter.close()


def test_lines_say_the_time_that_is_left(config, monkeypatch, capfd):
    """By the pace since the first step of this process, which was compiled before it; resumed at 40, that is 41."""
    reporter = Reporter(config.run_dir, 40, dataclasses.replace(config, wandb="", tensorboard=False, steps=100))
    for step, clock in ((41, 1000.0), (50, 1018.0), (100, 1118.0)):
        monkeypatch.setattr(reporter._bar, "get_time", lambda clock=clock: clock)
        reporter.step(step, {"loss": 2.5, "tokens_per_second": 10.0})
    reporter.close()
    first, last = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert first.endswith("10 tokens/s  about 0:01:40 left")  # 50 steps of 2 s
    assert last.startswith("step 100/100") and "left" not in last


@pytest.mark.parametrize("text", ["runs/[b]/x[/b]", "[/b] a path's end", "[red]not red", "\\[x]", "[link=x]"])
def test_what_looks_like_markup_is_text(config, monkeypatch, capfd, text):
    """In a line, and in the bar: paths and texts may hold brackets."""
    reporter = Reporter(config.run_dir, 0, dataclasses.replace(config, wandb="", tensorboard=False))
    reporter.say(text)
    monkeypatch.setattr(reporter._bar, "disable", False)
    reporter._bar.update(reporter._task, description=text)
    reporter._console.print(reporter._bar.get_renderable())
    reporter.close()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == text and text in lines[1]
