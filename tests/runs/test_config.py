"""Configs: what they leave open is inherited, a short run has a short warm-up, every key can be a flag."""

import dataclasses
import json

import pytest

from ringformer.cli.dataclass_flags import field_docs
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.ops.tokenwise.rope import RopeScaling
from ringformer.parallel.lora import LoraConfig
from ringformer.runs.config import Config, DataConfig, OptimizerConfig, base_config
from ringformer.runs.config_file import load_config, parse, parse_stages
from ringformer.train.checks import check_folders, context_changes
from ringformer.train.prepare import folder_of

YARN = {"kind": "yarn", "factor": 8.0, "original_max_position": 64}


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a model whose rope and norm are no preset's."""
    model = LlamaConfig(**preset("tiny") | {"rope_theta": 7e5, "rope_scaling": YARN, "norm_eps": 3e-5})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": dataclasses.asdict(model)}))
    return folder


def config(folder, **changes):
    values = base_config("tiny")
    values.data.store, values.init_from = "store", str(folder)
    for key, value in changes.items():
        values.model[key] = value
    return values


def test_rope_and_norm_are_those_of_the_model_that_a_run_begins_with(checkpoint):
    model = parse(config(checkpoint)).model
    assert (model.rope_theta, model.rope_scaling, model.norm_eps) == (7e5, RopeScaling(**YARN), 3e-5)
    assert context_changes(parse(config(checkpoint))) == []
    alone = parse(config("")).model
    assert (alone.rope_theta, alone.rope_scaling, alone.norm_eps) == (1e4, RopeScaling(), 1e-6)
    elsewhere = parse(config("/nowhere"), inherit=False)  # an estimate needs no checkpoint
    assert elsewhere.model == alone


@pytest.mark.parametrize("name", ["llama2_7b", "llama3_8b", "llama3.1_8b"])
def test_a_preset_keeps_its_own(name):
    values = base_config(name)
    values.data.store = "store"
    assert parse(values).model == LlamaConfig(**preset(name))


def test_what_is_written_wins_for_rope_and_is_said(checkpoint):
    """Even the preset's own value, written out; of a scaling, one field alone or another kind."""
    run = parse(config(checkpoint, rope_theta=1e4))
    assert (run.model.rope_theta, run.model.rope_scaling) == (1e4, RopeScaling(**YARN))
    assert context_changes(run) == ["rope_theta 700000 -> 10000"]
    values = config(checkpoint)
    values.model.rope_scaling.factor = 16.0
    run = parse(values)
    assert run.model.rope_scaling == RopeScaling(**YARN | {"factor": 16.0})
    assert context_changes(run) == [
        "rope_scaling yarn(factor=8, original_max_position=64) -> yarn(factor=16, original_max_position=64)"
    ]
    values = config(checkpoint)
    values.model.rope_scaling.kind = "none"
    assert context_changes(parse(values)) == ["rope_scaling yarn(factor=8, original_max_position=64) -> none"]


def test_the_command_line_writes_too(checkpoint, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    config = base_config('tiny')\n"
        "    config.data.store = 'store'\n    return config\n"
    )
    begin = f"--config.init_from={checkpoint}"
    assert parse(load_config(path, [begin])).model.rope_theta == 7e5
    assert parse(load_config(path, [begin, "--config.model.rope_theta=5e6"])).model.rope_theta == 5e6
    linear = ["--config.model.rope_scaling.kind=linear", "--config.model.rope_scaling.factor=2"]
    assert parse(load_config(path, [begin, *linear])).model.rope_scaling == RopeScaling("linear", 2.0)


def test_another_norm_is_refused(checkpoint, tmp_path):
    run = parse(config(checkpoint, norm_eps=1e-6))
    with pytest.raises(ValueError, match=r"another model \(norm_eps 3e-05 there, 1e-06 here\)"):
        check_folders(tmp_path / "run", run)


@pytest.mark.parametrize("name", ["a[1]", "a*", "what?"])
def test_a_path_that_checkpoints_are_not_found_in_is_refused(tmp_path, name, monkeypatch):
    """In the name of the run, or anywhere above it."""
    with pytest.raises(ValueError, match=r"contains .*, which the checkpoint library takes for a pattern"):
        folder_of(str(tmp_path / name))
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match="choose another path"):
        folder_of("run")


def test_stages_hand_their_rope_on(checkpoint):
    values = config(checkpoint)
    values.run_dir = "run"
    values.stages = ({"seq_len": 64}, {"seq_len": 128, "model.rope_scaling.factor": 16.0}, {"seq_len": 256})
    found = [(run.model.rope_theta, run.model.rope_scaling.factor, run.model.norm_eps) for run in parse_stages(values)]
    assert found == [(7e5, 8.0, 3e-5), (7e5, 16.0, 3e-5), (7e5, 16.0, 3e-5)]
    theta = {"seq_len": 64, "model.rope_theta": 9e6}
    values.stages = (theta | {"model.rope_scaling.kind": "none"}, {"seq_len": 128})
    assert [(run.model.rope_theta, run.model.rope_scaling.kind) for run in parse_stages(values)] == [(9e6, "none")] * 2
    values.stages = (theta,)
    with pytest.raises(ValueError, match=r"stage 1: .* both extend the context: set the theta"):
        parse_stages(values)
    values.stages = ({"seq_len": 64, "model.norm_eps": 1e-6},)
    with pytest.raises(ValueError, match=r"stage 1: model\.norm_eps is the same in all stages"):
        parse_stages(values)


def test_a_run_that_was_begun_needs_no_checkpoint_to_go_on(checkpoint, tmp_path):
    """What it inherited stands in its own folder."""
    values = config(tmp_path / "gone")
    values.run_dir = str(checkpoint)
    with pytest.raises(FileNotFoundError, match="gone has no"):
        parse(values)
    (checkpoint / "metrics.jsonl").touch()
    assert parse(values).model.rope_theta == 7e5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama"}', "convert it first, with ringformer convert from-hf"),
        ('{"steps": 3}', "name a run's folder"),
        ('{"model": {"vocab', r"config\.json is not JSON"),
        ("[]", "holds a JSON list, not an object"),
    ],
)
def test_a_config_that_is_no_run_s_is_told_from_one(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        parse(config(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.rope_theta", "nan"),
        ("model.norm_eps", "nan"),
        ("model.norm_eps", "0"),
        ("checkpoint_every", "-1"),
        ("optimizer.final_fraction", "5"),
        ("optimizer.learning_rate", "nan"),
        ("eval_every", "-2"),
        ("seed", "-1"),
    ],
)
def test_values_that_cannot_be(tmp_path, key, value):
    path = tmp_path / "config.py"
    path.write_text(
        "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    config = base_config('tiny')\n"
        "    config.data.store = 'store'\n    return config\n"
    )
    with pytest.raises(ValueError, match=key.rsplit(".")[-1]):
        parse(load_config(path, [f"--config.{key}={value}"]))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: name the folder of a run"):
        parse(config(tmp_path))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 1), (500, 50), (100_000, 100)])
def test_a_short_run_has_a_short_warm_up(steps, warmup):
    values = base_config("tiny")
    values.data.store, values.steps = "store", steps
    assert parse(values).optimizer.warmup(steps) == warmup


@pytest.mark.parametrize("cls", (Config, DataConfig, OptimizerConfig, LoraConfig, LlamaConfig, RopeScaling))
def test_every_key_says_what_it_means(cls):
    """`ringformer train --help` and the site's page of keys are made of these."""
    parts = {"model", "data", "optimizer", "lora"}
    silent = {field.name for field in dataclasses.fields(cls)} - set(field_docs(cls)) - parts
    assert not silent


def test_the_old_place_of_base_config_still_works():
    """Configs written before 0.2.0 import it from there."""
    with pytest.warns(DeprecationWarning, match="from ringformer import base_config"):
        from ringformer.train.config import base_config as moved
    assert moved is base_config
