"""With init_from, a run has the model of that folder: its family and sizes, and of the config what is set in it."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from ringformer.checkpoints.saved_model import model_of
from ringformer.cli import main
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import estimate_command, named_model, preset_workload
from ringformer.models.registry import FAMILIES, preset_config, registered_by
from ringformer.ops.tokenwise.rope import RopeScaling
from ringformer.runs.config import base_config
from ringformer.runs.config_file import load_config, parse, parse_stages
from ringformer.train.checks import check_folders, check_start, theta_warnings
from tests.models.toy import ToyConfig

ROOT = Path(__file__).parents[2]
EXTENSION, QUICKSTART = (ROOT / "configs" / f"{name}.py" for name in ("tiny_extension", "quickstart"))
SIZES = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
}
"""Those of no preset."""
THETA = {"rope_theta": 1e5, "rope_scaling": RopeScaling()}
"""A longer rope than that of `EXTENSION`."""
SHIPPED = [name for name, family in FAMILIES.items() if family.config.__module__.startswith("ringformer.")]
PRESETS = {family: next(iter(FAMILIES[family].presets)) for family in SHIPPED}
"""One preset of each family."""


def model(family: str, **changes):
    """A small model with the rope, windows and kinds of layers of the family's last preset."""
    last = list(FAMILIES[family].presets.values())[-1]
    return FAMILIES[family].config(**{**last, **SIZES, **changes})


def checkpoint(folder: Path, architecture) -> Path:
    """A folder with the description of a model, as a conversion writes it, but without weights."""
    folder.mkdir()
    described = {"model": dataclasses.asdict(architecture)} | registered_by(architecture)
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def begin(preset: str, init_from: Path | str, **keys):
    """A config that begins with a model."""
    values = base_config(preset)
    values.data.store, values.init_from = "store", str(init_from)
    for key, value in keys.items():
        values.model[key] = value
    return values


def architecture(config) -> dict:
    return {name: getattr(config, name) for name in (*config.ARCHITECTURE, *config.INHERITED)}


@pytest.mark.parametrize("family", SHIPPED)
def test_family_and_sizes_are_the_checkpoint_s_whatever_the_preset_is(family, tmp_path):
    there = model(family)
    folder = checkpoint(tmp_path / "there", there)
    for preset in PRESETS.values():
        run = parse(begin(preset, folder, remat="attention", init_std=0.5))
        assert type(run.model) is type(there) and architecture(run.model) == architecture(there)
        assert (run.model.remat, run.model.init_std) == ("attention", 0.5)
        check_start(run)


@pytest.mark.parametrize("family", SHIPPED)
def test_a_preset_names_nothing_but_the_architecture(family):
    """So nothing of it is left in a run that begins with another model."""
    config = FAMILIES[family].config
    named = {key for preset in FAMILIES[family].presets.values() for key in preset}
    assert named <= {*config.ARCHITECTURE, *config.INHERITED}


def test_a_theta_of_a_model_without_positions_is_warned_of(tmp_path):
    """In a run, and in a later stage; not where some layers have them."""
    folder = checkpoint(tmp_path / "there", model("smollm3", layer_types="N" * model("smollm3").num_layers, **THETA))
    for theta in (4e5, 5e4):
        (warning,) = theta_warnings([parse(begin("tiny", folder, rope_theta=theta))])
        assert warning.endswith(f"rope_theta={theta:g} has no effect: no layer of the model has rotary positions")
    stages = begin("tiny", folder)
    stages.stages = ({"seq_len": 64}, {"seq_len": 128, "model.rope_theta": 4e5})
    (warning,) = theta_warnings(parse_stages(stages))
    assert warning.startswith("warning: stage 2: model.rope_theta=400000 has no effect")
    some = checkpoint(tmp_path / "some", model("smollm3", **THETA))
    assert theta_warnings([parse(begin("tiny", some, rope_theta=4e5))]) == []


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_size_that_is_set_is_compared_even_if_it_is_the_preset_s(family, tmp_path):
    """In a file, on the command line, in a copy of the config."""
    folder = checkpoint(tmp_path / "there", model(family))
    path = tmp_path / "config.py"
    text = "from ringformer import base_config\n\n\ndef get_config():\n    config = base_config('tiny')\n"
    path.write_text(f"{text}    config.data.store = 'store'\n    return config\n")
    words = [f"--config.init_from={folder}", "--config.model.vocab_size=257"]
    in_file = begin("tiny", folder, vocab_size=257)
    of_stages = in_file.copy_and_resolve_references()
    of_stages.stages = ({"seq_len": 64},)
    for values in (load_config(path, words), in_file, copy.deepcopy(in_file), of_stages):
        for run in parse_stages(values):
            with pytest.raises(
                ValueError, match=r"there holds another model \(vocab_size 384 there, 257 here\): leave"
            ):
                check_folders(tmp_path / "run", run)
    check_start(parse(load_config(path, words[:1])))


def test_a_size_that_is_only_read_is_not_set(tmp_path):
    values = begin("tiny", checkpoint(tmp_path / "there", model("llama")))
    assert values.model.get_ref("hidden_size").get() == 128
    check_start(parse(values))


def test_a_key_that_the_checkpoint_s_family_does_not_have_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "there", model("llama"))
    with pytest.raises(ValueError, match=r"model\.layer_types is no key of LlamaConfig, the model that the run starts"):
        parse(begin("qwen3_0.6b", folder, layer_types="F"))
    toy = checkpoint(tmp_path / "toy", ToyConfig(width=40))
    with pytest.raises(ValueError, match=r"model\.remat is no key of ToyConfig"):
        parse(begin("tiny", toy, remat="none"))
    assert parse(begin("tiny", toy)).model == ToyConfig(width=40)


def test_a_preset_on_the_command_line_is_only_a_name(tmp_path):
    """With init_from it changes nothing; without, it would be half of a model."""
    folder = checkpoint(tmp_path / "there", model("llama"))
    preset = "--config.preset=qwen3_0.6b"
    assert architecture(parse(load_config(QUICKSTART, [preset, f"--config.init_from={folder}"])).model) == architecture(
        model("llama")
    )
    values = load_config(QUICKSTART, [preset])
    message = r"preset='qwen3_0\.6b', but the config's model is that of base_config\('tiny'\): call base_config\('qwen3"
    with pytest.raises(ValueError, match=message):
        parse(values)


def test_stages_without_a_folder_have_the_checkpoint_s_sizes(tmp_path):
    there = model("llama", **THETA)
    folder = checkpoint(tmp_path / "there", there)
    for run_dir in ("", str(tmp_path / "run")):
        runs = parse_stages(load_config(EXTENSION, [f"--config.init_from={folder}", f"--config.run_dir={run_dir}"]))
        assert [run.model.num_params for run in runs] == [there.num_params] * 3
        assert [run.model.rope_theta for run in runs] == [1e5, 4e4, 8e4]


def test_a_resumed_run_has_its_own_sizes_and_needs_no_checkpoint(tmp_path):
    run_dir = checkpoint(tmp_path / "run", model("qwen3"))
    (run_dir / "metrics.jsonl").touch()
    values = begin("tiny", tmp_path / "gone")
    values.run_dir = str(run_dir)
    assert architecture(parse(values).model) == architecture(model("qwen3"))
    check_folders(run_dir, parse(values))


def test_a_run_of_fresh_parameters_is_not_continued_with_another_model(tmp_path):
    """Of another size, or of another family: here the preset is the model."""
    run_dir = checkpoint(tmp_path / "run", parse(begin("tiny", "")).model)
    (run_dir / "metrics.jsonl").touch()
    for preset, message in (
        ("small", "hidden_size 128 there, 256 here"),
        ("qwen3_0.6b", "LlamaConfig there, Qwen3Con"),
    ):
        values = begin(preset, "")
        values.run_dir = str(run_dir)
        with pytest.raises(ValueError, match=rf"run holds another model \({message}.*: choose another folder"):
            check_folders(run_dir, parse(values))


def test_a_model_records_its_family_and_is_read_by_it(tmp_path):
    """Even a LLaMA's, and whatever preset the config of the run began with."""
    for family in SHIPPED:
        assert registered_by(model(family)) == {"family": family}
        folder = checkpoint(tmp_path / family, model(family))
        for preset in PRESETS.values():
            saved = json.loads((folder / "config.json").read_text()) | {"preset": preset}
            (folder / "config.json").write_text(json.dumps(saved))
            assert model_of(folder) == model(family)
    toy = checkpoint(tmp_path / "toy", ToyConfig(width=40))
    saved = json.loads((toy / "config.json").read_text()) | {"preset": "tiny"}
    (toy / "config.json").write_text(json.dumps(saved))
    assert model_of(toy) == ToyConfig(width=40)


def test_runs_of_older_versions_are_read(tmp_path):
    """They recorded no family for a LLaMA, even if the config began with a preset of another family."""
    for preset in ("", "tiny", "qwen3_0.6b", "gemma3_1b"):
        folder = tmp_path / f"run{preset}"
        folder.mkdir()
        saved = {"preset": preset, "model": dataclasses.asdict(model("llama"))}
        (folder / "config.json").write_text(json.dumps(saved))
        assert model_of(folder) == model("llama")


def test_a_smaller_theta_than_the_checkpoint_s_is_warned_of(tmp_path):
    folder = checkpoint(tmp_path / "there", model("llama", **THETA))
    warned = theta_warnings(parse_stages(load_config(EXTENSION, [f"--config.init_from={folder}"])))
    begins = [
        f"warning: stage {n}: model.rope_theta={theta} is below the 100000 that" for n, theta in ((2, 4e4), (3, 8e4))
    ]
    assert len(warned) == 2
    assert all(line.startswith(start.replace(".0 ", " ")) for line, start in zip(warned, begins, strict=True))
    assert theta_warnings(parse_stages(load_config(EXTENSION, []))) == []
    (lower,) = theta_warnings([parse(begin("tiny", folder, rope_theta=5e4))])
    assert lower.startswith("warning: model.rope_theta=50000 is below the 100000")
    assert theta_warnings([parse(begin("tiny", folder))]) == []
    falling = begin("tiny", "")
    falling.stages = ({"seq_len": 64, "model.rope_theta": 1e6}, {"seq_len": 128, "model.rope_theta": 1e5})
    assert len(theta_warnings(parse_stages(falling))) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plans_and_estimates_take_the_folder_of_a_model(family, tmp_path, capsys):
    """With its sizes, not with the options of the run that trained it."""
    there = model(family)
    folder = str(checkpoint(tmp_path / "there", dataclasses.replace(there, remat="attention", ffn_chunk=64)))
    assert named_model(folder) == there
    assert named_model(folder, q_chunk=128) == dataclasses.replace(there, q_chunk=128)
    assert named_model("tiny") == preset_config("tiny")
    workload = preset_workload(folder, find_target("v5e-8"), 2048)
    words = estimate_command(workload).split()
    assert f"--model={folder}" in words
    assert main([*words[1:], "--closed_form"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == folder
    assert main(["estimate", "--model=none", "--target=v5e-8", "--seq_len=2048"]) == 2
    assert "unknown model 'none'; known models: tiny" in capsys.readouterr().err


def estimate(capsys, *words, file=EXTENSION) -> tuple[list[int], str]:
    """The peak bytes of each stage, by the closed forms, and what else is printed."""
    code = main(["estimate", f"--config={file}", "--target=v5e-8", "--closed_form", "--json", *words])
    out, err = capsys.readouterr()
    return ([json.loads(line)["peak_bytes"] for line in out.splitlines()] if code == 0 else []), err


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_estimate_is_of_the_checkpoint(family, tmp_path, capsys):
    """As if the config had the checkpoint's family and sizes itself."""
    there = model(family, num_heads=8, **THETA)
    folder = checkpoint(tmp_path / "there", there)
    (tmp_path / "same.py").write_text(
        EXTENSION.read_text().replace('base_config("tiny")', f'base_config("{PRESETS[family]}")')
    )
    sizes = {name: value for name, value in architecture(there).items() if name != "rope_scaling"}
    same, _ = estimate(capsys, *(f"--config.model.{k}={v}" for k, v in sizes.items()), file=tmp_path / "same.py")
    preset, _ = estimate(capsys)
    for words in ([], ["--config.run_dir="]):
        peaks, err = estimate(capsys, f"--config.init_from={folder}", *words)
        assert peaks == same and len(peaks) == 3 and not set(peaks) & set(preset)
        assert "warning: stage 3: model.rope_theta=80000" in err
    peaks, err = estimate(capsys, f"--config.init_from={folder}", "--config.model.vocab_size=257")
    assert not peaks and "there holds another model (vocab_size 384 there, 257 here)" in err
    shutil.rmtree(folder)
    peaks, err = estimate(capsys, f"--config.init_from={folder}")
    assert peaks == preset and f"init_from={folder} is not on this machine: the estimate is of the preset tiny" in err
