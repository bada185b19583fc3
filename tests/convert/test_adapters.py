"""Adapters trained on a ring go to PEFT, and merged weights to transformers: logits and tokens are the same there."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step, model_of
from ringformer.cli import main
from ringformer.convert import from_hf
from ringformer.convert.peft import from_peft
from ringformer.files.atomic import write_object
from ringformer.files.untrusted import read_object
from ringformer.inference.generator import Generator, load_model
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.convert.families import save_tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PROMPT = [int(x) for x in np.random.default_rng(0).integers(0, 257, 24)]


@pytest.fixture(scope="module", params=["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def folder(tmp_path_factory, request):
    """A base as transformers saved it, and a run that trained adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    save_tiny(request.param, folder / "theirs", initializer_range=0.1)
    from_hf(folder / "theirs", folder / "base")
    rows = [{"text": f"{i} keys and values travel around the ring while queries stay"} for i in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = base_config("tiny")
    values.update({"init_from": str(folder / "base"), "run_dir": str(folder / "run"), "mesh_dim": "8,1,1,1"})
    values.update({"seq_len": 64, "batch_size": 8, "steps": 12})
    values.data.update({"store": str(folder / "store"), "source": f"jsonl:{folder}/rows.jsonl", "held_out": 0.0})
    values.model.compute_dtype = "float32"
    values.optimizer.learning_rate = 2e-2
    values.lora.update({"rank": 4, "alpha": 6.0})
    train(prepare(parse(values)))
    assert main(["convert", "to-peft", str(folder / "run"), str(folder / "peft")]) == 0
    assert main(["convert", "to-hf", str(folder / "run"), str(folder / "merged")]) == 0
    return folder


def with_peft(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder / "peft").eval()


@pytest.mark.slow
def test_peft_has_the_same_logits_and_tokens(folder):
    theirs, ours = with_peft(folder), load_model(folder / "run", attention="blockwise")
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0].numpy()
        with theirs.disable_adapter():
            of_base = theirs(torch.tensor([PROMPT])).logits[0].numpy()
        text = list(PROMPT)
        for _ in range(12):
            text.append(int(theirs(torch.tensor([text])).logits[0, -1].argmax()))
    logits = np.asarray(ours(np.array([PROMPT], np.int32)))[0]
    assert np.abs(logits - expected).max() <= 1e-5 < 0.1 < np.abs(of_base - expected).max()
    model = Generator.load(folder / "run", mesh_dim="1,1,2,4", max_length=64)
    assert model.generate([PROMPT], max_new_tokens=12) == [text[len(PROMPT) :]]


@pytest.mark.slow
def test_the_code_of_the_card_loads_them(folder, monkeypatch):
    monkeypatch.chdir(folder / "peft")
    code = (folder / "peft" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(code, names := {})
    with torch.no_grad():
        logits, expected = (
            model(torch.tensor([PROMPT])).logits for model in (names["model"].eval(), with_peft(folder))
        )
    assert torch.equal(logits, expected)


@pytest.mark.slow
def test_merged_weights_are_those_of_peft(folder):
    merged = with_peft(folder).merge_and_unload().state_dict()
    exported = load_file(folder / "merged" / "model.safetensors")
    assert [name for name in exported if not torch.equal(exported[name], merged[name])] == []
    assert main(["convert", "verify", str(folder / "merged"), str(folder / "run")]) == 0


def test_adapters_of_peft_are_added(folder, tmp_path):
    """The same bits as an export of the run that trained them."""
    command = ["convert", "from-hf", str(folder / "theirs"), str(tmp_path / "ours"), f"--adapters={folder}/peft"]
    assert main(command) == 0
    assert main(["convert", "to-hf", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    again, merged = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folder / "merged"))
    assert all(torch.equal(again[name], merged[name]) for name in merged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "has use_dora=True: only False can be converted"),
        ({"r": 0}, "has r=0 and lora_alpha=6.0"),
        ({"r": 3}, "is F32 [4, 32], must be [3, 32]: adapters of another base?"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save=['lm_head']"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa': only True can be converted"),
        ({"alora_invocation_tokens": [1, 2]}, "has alora_invocation_tokens=[1, 2]: only None can be converted"),
        ({"lora_alpha": True}, "has r=4 and lora_alpha=True, must be numbers above 0"),
        ({"target_modules": ["q_proj"]}, "target_modules and the tensors differ in "),
    ],
    ids=["dora", "rank 0", "another rank", "modules_to_save", "pissa", "alora", "alpha", "listed"],
)
def test_other_adapters_are_refused(folder, tmp_path, capsys, change, message):
    shutil.copytree(folder / "peft", tmp_path / "peft")
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(described | change))
    command = ["convert", "from-hf", str(folder / "theirs"), str(tmp_path / "ours"), f"--adapters={tmp_path}/peft"]
    assert main(command) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "ours").exists()


def test_a_file_that_is_cut_short_is_refused(folder, tmp_path, capsys):
    shutil.copytree(folder / "peft", tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:300])
    command = ["convert", "from-hf", str(folder / "theirs"), str(tmp_path / "ours"), f"--adapters={tmp_path}/peft"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "is not a complete safetensors file" in error and error.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_adapters_in_bfloat16(folder, tmp_path):
    """Read as they are: as the same values in float32."""
    merged = {}
    for dtype in (torch.bfloat16, torch.float32):
        peft, ours, again = (tmp_path / f"{name}-{dtype}" for name in ("peft", "ours", "again"))
        shutil.copytree(folder / "peft", peft)
        tensors = load_file(folder / "peft" / "adapter_model.safetensors")
        save_file({name: x.bfloat16().to(dtype) for name, x in tensors.items()}, peft / "adapter_model.safetensors")
        assert main(["convert", "from-hf", str(folder / "theirs"), str(ours), f"--adapters={peft}"]) == 0
        assert main(["convert", "to-hf", str(ours), str(again)]) == 0
        merged[dtype] = load_file(again / "model.safetensors")
    assert all(torch.equal(x, merged[torch.float32][name]) for name, x in merged[torch.bfloat16].items())


def test_the_base_of_adapters_is_named(folder):
    """So that PEFT itself finds the weights that were converted."""
    described = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(folder / "theirs") and described["revision"] is None


def test_adapters_of_another_base_are_refused(folder, tmp_path, capsys):
    save_tiny("llama", tmp_path / "theirs", hidden_size=48)
    command = ["convert", "from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), f"--adapters={folder}/peft"]
    assert main(command) == 2
    assert "adapters of another base?" in capsys.readouterr().err and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_weights_of_another_base_of_the_same_shape_are_refused(folder, tmp_path, capsys, dtype):
    """One weight differs by one step of bfloat16; the base itself is found again in either dtype."""
    shutil.copytree(folder / "theirs", tmp_path / "theirs")
    tensors = load_file(folder / "theirs" / "model.safetensors")
    stored = {name: x.to(dtype) for name, x in tensors.items()}
    save_file(stored, tmp_path / "theirs" / "model.safetensors")
    command = ["convert", "from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), f"--adapters={folder}/peft"]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(tmp_path / "ours")
    last = stored["model.layers.1.mlp.down_proj.weight"]
    last[-1, -1] *= 1.01
    save_file(stored, tmp_path / "theirs" / "model.safetensors")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "/peft has adapters of other weights: of " in error and error.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_adapters_that_name_no_weights_are_said_to(folder, tmp_path, capsys):
    """Those that PEFT itself wrote."""
    shutil.copytree(folder / "peft", tmp_path / "peft")
    tensors = load_file(folder / "peft" / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors", {"format": "pt"})
    command = ["convert", "from-hf", str(folder / "theirs"), str(tmp_path / "ours"), f"--adapters={tmp_path}/peft"]
    assert main(command) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {tmp_path}/peft does not say which weights its adapters were trained on")


def test_the_base_on_the_hub_is_compared(folder, tmp_path):
    """By name and commit, if both sides name a repository."""
    config = model_of(folder / "base")
    described = json.loads((folder / "peft" / "adapter_config.json").read_text())
    for named, revision, origin, refused in (
        ("org/m", "c1", "hf://org/m@c1", False),
        ("org/m", None, "hf://org/m@c1", False),
        ("org/m", "c2", "hf://org/m@c1", True),
        ("org/m", "c1", "hf://org/other@c1", True),
        ("org/m", "c1", "models/m", False),
        ("/a/folder", None, "hf://org/m@c1", False),
    ):
        shutil.copytree(folder / "peft", tmp_path / "peft", dirs_exist_ok=True)
        changed = described | {"base_model_name_or_path": named, "revision": revision}
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(changed))
        if refused:
            with pytest.raises(
                ValueError, match=rf"has adapters of {named}@{revision}, not of {origin}: name the folder"
            ):
                from_peft(tmp_path / "peft", config, origin)
        else:
            assert from_peft(tmp_path / "peft", config, origin)


def test_what_has_no_adapters_is_refused(folder, tmp_path, capsys):
    assert main(["convert", "to-peft", str(folder / "base"), str(tmp_path / "out")]) == 2
    assert "has no adapters: export its weights with ringformer convert to-hf" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_base_named_from_the_working_directory_is_found_from_elsewhere(tmp_path, monkeypatch):
    """The model card's code runs in the folder of the adapters."""
    save_tiny("qwen3", tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    from_hf("theirs", tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["origin"] == str(tmp_path / "theirs")


@pytest.mark.parametrize("bases", [("a",), ("b", "a")], ids=["itself", "one another"])
def test_runs_that_are_their_own_base_are_refused(folder, tmp_path, capsys, bases):
    """Crafted by hand: each of them has adapters of the next one."""
    for name, base in zip(("a", "b"), bases, strict=False):
        shutil.copytree(folder / "run", tmp_path / name)
        recorded = read_object(tmp_path / name, "identity.json")
        checkpoint = checkpoint_hash(tmp_path / name / "checkpoints" / str(latest_step(tmp_path / name)))
        recorded["identity"]["init_from"] |= {"at": str(tmp_path / base), "checkpoint": checkpoint}
        write_object(tmp_path / name / "identity.json", recorded)
    for command in (
        ["convert", "to-hf", f"{tmp_path}/a", f"{tmp_path}/out"],
        ["generate", "--prompt=hi", "--max_new_tokens=4", f"--run={tmp_path}/a"],
    ):
        assert main(command) == 2
        assert f"{tmp_path}/a has adapters of its own weights" in capsys.readouterr().err.splitlines()[-1]
