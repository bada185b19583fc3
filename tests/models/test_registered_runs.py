"""Runs whose model a config file registers: other verbs are told the file, and execute none that a folder names."""

import json

import pytest

from ringformer.cli import main
from ringformer.models import registry

CONFIG = """
from dataclasses import dataclass
from pathlib import Path
from ringformer.models.decoder import Decoder
from ringformer.models.families.llama import LlamaConfig
from ringformer.models.registry import Family, register
from ringformer.runs.config import base_config

@dataclass(frozen=True)
class MyConfig(LlamaConfig):
    pass

Path(__file__).with_name("executed").touch()
sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_layers=1,
             num_heads=2, num_kv_heads=1, head_dim=16)
register("mine", Family(MyConfig, Decoder, {"my_llama": sizes}))

def get_config():
    config = base_config("my_llama")
    config.mesh_dim = "1,8,1,1"
    config.seq_len = 128
    config.batch_size = 8
    config.steps = 2
    config.eval_batches = 1
    config.optimizer.warmup_steps = 1
    config.model.compute_dtype = "float32"
    return config
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the config file and a run of it."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(CONFIG)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{i} apples " * 40}) + "\n" for i in range(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
        overrides = [
            f"--config.run_dir={folder}/run",
            f"--config.data.store={folder}/store",
            f"--config.data.source=jsonl:{folder}/text.jsonl",
            "--config.data.held_out=0.2",
        ]
        assert main(["train", f"--config={folder}/mine.py", *overrides]) == 0
    return folder


@pytest.fixture(autouse=True)
def fresh(monkeypatch, trained):
    """No family but ringformer's, as in another process; `FAMILIES` is the same dictionary everywhere."""
    for name in set(registry.FAMILIES) - {"llama"}:
        monkeypatch.delitem(registry.FAMILIES, name)
    before = dict(registry.FAMILIES)
    (trained / "executed").unlink(missing_ok=True)
    yield
    registry.FAMILIES.clear()
    registry.FAMILIES.update(before)


def verbs(folder, out):
    return [
        ["generate", f"--run={folder}/run", "--prompt=3 app", "--max_new_tokens=3"],
        ["eval", "perplexity", f"--run={folder}/run", f"--store={folder}/store", "--lengths=64", f"--out={out}/eval"],
        ["convert", "to-hf", f"{folder}/run", f"{out}/hf"],
    ]


@pytest.mark.slow
def test_the_run_records_family_and_file(trained):
    saved = json.loads((trained / "run" / "config.json").read_text())
    assert (saved["family"], saved["family_file"]) == ("mine", str(trained / "mine.py"))


@pytest.mark.usual("eval")
@pytest.mark.parametrize("which", range(3), ids=["generate", "eval", "convert"])
def test_a_verb_says_what_to_pass_and_takes_it(which, trained, tmp_path, capsys):
    words = verbs(trained, tmp_path)[which]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "'my_llama'" in said and f"{trained}/mine.py" in said and "--config=FILE" in said
    assert not (trained / "executed").exists()
    assert main([*words, f"--config={trained}/mine.py"]) == 0, capsys.readouterr().err
    assert (trained / "executed").exists()
