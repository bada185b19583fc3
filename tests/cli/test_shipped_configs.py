"""`ringformer configs list` and `copy`, from a clone and from a package that has the folders inside."""

import argparse
import dataclasses
import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from ringformer import LlamaConfig, preset
from ringformer.cli import shipped_configs
from ringformer.cli.shipped_configs import add_copy, add_list, copy, first_line, folder, shipped
from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.stores.options import StoreOptions
from ringformer.runs.config_file import load_config, parse, parse_stages
from tests.data.chat_samples import llama3
from tests.train.runs import write_chats

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.stem for path in ROOT.glob("configs/*.py"))


def call(add, *arguments):
    parser = argparse.ArgumentParser()
    run = add(parser)
    return run(parser.parse_args(arguments))


@pytest.fixture(params=["clone", "wheel"])
def layout(request, tmp_path, monkeypatch):
    """The package beside the folders, as in the repository, or around them, as in a wheel."""
    package = tmp_path / "site" / "ringformer"
    package.mkdir(parents=True)
    for name in ("configs", "scripts"):
        shutil.copytree(ROOT / name, (package if request.param == "wheel" else package.parent) / name)
    monkeypatch.setattr(shipped_configs, "__file__", str(package / "cli/shipped_configs.py"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "site"


def test_every_config_and_launch_script_is_listed_with_its_first_line(layout, capsys):
    assert call(add_list) is None
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == [*CONFIGS, "gpu_node.sh", "slurm.sh"]
    assert lines["quickstart"].startswith("Byte-level LLaMA of 0.3M parameters on the Python standard library")
    assert lines["gpu_node.sh"] == "Train on one host with several GPUs, in one process."
    assert all(len(line) > 20 and line.endswith(".") for line in lines.values())
    call(add_list, "--paths")
    assert str(layout) in capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_s_first_line_says_what_it_is_for(name):
    line = first_line(ROOT / "configs" / f"{name}.py")
    assert line.endswith(".") and line in (ROOT / "configs" / f"{name}.py").read_text()


def test_a_copy_is_laid_out_as_in_the_repository(layout, capsys):
    """So the commands in its docstring work from here; a script comes with what it sources, and executes."""
    call(add_copy, "quickstart")
    assert Path("configs/quickstart.py").read_bytes() == (ROOT / "configs/quickstart.py").read_bytes()
    call(add_copy, "gpu_node.sh")
    call(add_copy, "slurm.sh")
    assert capsys.readouterr().out.splitlines() == [
        "configs/quickstart.py",
        "scripts/gpu_node.sh",
        "scripts/launch_options.sh",
        "scripts/option_values.sh",
        "scripts/slurm.sh",
    ]
    common = ["--config=configs/quickstart.py", "--run_dir=runs/x", "--dry-run"]
    for command in (["gpu_node.sh", "--skip-estimate"], ["slurm.sh", "--target=8xH100"]):
        done = subprocess.run(["bash", f"scripts/{command[0]}", *command[1:], *common], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert " python -m ringformer.cli train " in done.stdout, "no clone around: that of the active environment"


@pytest.mark.parametrize(
    ("name", "destination", "written"),
    [
        ("configs/quickstart.py", None, "configs/quickstart.py"),
        ("quickstart.py", "mine", "mine/quickstart.py"),
        ("quickstart", "mine/first.py", "mine/first.py"),
        ("quickstart", ".", "quickstart.py"),
    ],
)
def test_names_and_destinations(layout, name, destination, written):
    assert copy(name, destination and Path(destination)) == [Path(written)]
    assert Path(written).read_bytes() == (ROOT / "configs/quickstart.py").read_bytes()


def test_nothing_is_overwritten(layout):
    copy("quickstart")
    Path("configs/quickstart.py").write_text("mine")
    with pytest.raises(ValueError, match=r"configs/quickstart\.py already exists: choose another destination"):
        copy("quickstart")
    assert Path("configs/quickstart.py").read_text() == "mine"
    Path("scripts").mkdir()
    Path("scripts/launch_options.sh").write_text("mine")
    with pytest.raises(ValueError, match=r"launch_options\.sh already exists"):
        copy("slurm.sh")
    assert not Path("scripts/slurm.sh").exists(), "all or nothing"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quickstar", "did you mean 'quickstart'"),
        ("setup_venv.sh", "there is no config or launch script"),
        ("zzz", "there are: demo_finetune, "),
        ("tpu_pod.sh", "there is no config or launch script"),
    ],
)
def test_an_unknown_name_is_told(layout, name, message):
    with pytest.raises(ValueError, match=message):
        call(add_copy, name)


def test_an_installation_without_the_folders_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped_configs, "__file__", str(tmp_path / "ringformer" / "cli/shipped_configs.py"))
    with pytest.raises(FileNotFoundError, match="this installation has no configs"):
        shipped()
    with pytest.raises(FileNotFoundError, match="this installation has no scripts"):
        folder("scripts")


@pytest.mark.parametrize("name", ["llama3_8b_512k_8xh100", "llama3_8b_1m_8xh200"])
def test_a_theta_takes_the_place_of_the_checkpoint_s_scaling(name, tmp_path):
    """As in the command of their docstrings, which begins with a LLaMA-3.1."""
    model = LlamaConfig(**preset("llama3.1_8b"))
    assert model.rope_scaling.kind == "llama3"
    (tmp_path / "config.json").write_text(json.dumps({"model": dataclasses.asdict(model)}))
    config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]()
    config.init_from = str(tmp_path)
    runs = parse_stages(config)
    assert {run.model.rope_scaling.kind for run in runs} == {"none"}
    assert [run.model.rope_theta for run in runs][:2] == [207.1e6, 1.06e9]


@pytest.fixture(scope="module")
def anybody_s_store(tmp_path_factory):
    """As `ringformer data prepare` leaves it: of chats, with another share held out; its source is elsewhere."""
    folder = tmp_path_factory.mktemp("anybody")
    write_chats(folder / "chats.json")
    options = StoreOptions(
        f"json:{folder}/chats.json", format="messages", template="llama3", held_out=0.3, clean="html"
    )
    tokenizer = load_tokenizer(str(llama3(folder / "tokenizer")))
    open_or_build(folder / "store", options, tokenizer)
    (folder / "chats.json").unlink()
    return folder / "store", folder / "tokenizer", tokenizer


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_as_it_ships_trains_on_anybody_s_store(name, anybody_s_store, tmp_path):
    """What the file pins of the making of a store is that of its own; what the command line says is compared."""
    store, folder, tokenizer = anybody_s_store
    one = "--config.data.mixture="  # in place of a recipe's mixture
    named = [one, f"--config.data.store={store}", f"--config.data.tokenizer={folder}"]
    for config in parse_stages(load_config(ROOT / "configs" / f"{name}.py", named), inherit=False):
        train, held = open_or_build(config.data.store, config.data, tokenizer)
        assert (train.path, held.path) == (store / "train", store / "eval")
        assert (config.data.held_out, config.data.format, config.data.clean) == (0.3, "messages", "html")
    for key, value in (("source", "stdlib"), ("held_out", "0.01"), ("clean", "short")):
        (config, *_) = parse_stages(
            load_config(ROOT / "configs" / f"{name}.py", [*named, f"--config.data.{key}={value}"]), inherit=False
        )
        with pytest.raises(
            ValueError, match=f"were built with other options: {key} is .*To use them, set the same options"
        ):
            open_or_build(config.data.store, config.data, tokenizer)
    new = tmp_path / "new"  # where there is no store yet, the file says how to make it
    (config, *_) = parse_stages(
        load_config(ROOT / "configs" / f"{name}.py", [one, f"--config.data.store={new}"]), inherit=False
    )
    assert config.data.source == load_config(ROOT / "configs" / f"{name}.py", []).data.source


def test_a_file_that_names_a_store_means_what_it_writes_beside_it(anybody_s_store, tmp_path):
    store, _, tokenizer = anybody_s_store

    def config(**beside):
        lines = [f"    config.data.{key} = {value!r}\n" for key, value in (beside | {"store": str(store)}).items()]
        (tmp_path / "config.py").write_text(
            "from ringformer.runs.config import base_config\n\n\ndef get_config():\n"
            f"    config = base_config('tiny')\n{''.join(lines)}    return config\n"
        )
        return parse(load_config(tmp_path / "config.py", []), inherit=False).data

    assert (config().source, config().held_out) == (f"json:{store.parent}/chats.json", 0.3)
    open_or_build(store, config(), tokenizer)
    with pytest.raises(ValueError, match=r"held_out is 0\.3, not 0\.1"):
        open_or_build(store, config(held_out=0.1), tokenizer)
