"""A preset of any family with a checkpoint of any family, or of its own with other sizes, through all commands.

In the usual suite, some pairs are estimated; all are trained in the slow set.
"""

import json
import shutil
from functools import cached_property
from pathlib import Path

import pytest

from ringformer.checkpoints.saved_model import model_of
from ringformer.cli import main
from ringformer.convert import from_hf
from ringformer.models.registry import FAMILIES
from tests.convert.families import FAMILIES as TINY
from tests.convert.families import save_tiny
from tests.train.runs import saved_arrays

CONFIG = """
from ringformer import base_config


def get_config():
    config = base_config({preset!r})
    config.init_from, config.run_dir = {init_from!r}, {run_dir!r}
    config.mesh_dim, config.seq_len, config.batch_size, config.steps = "1,2,1,4", 64, 2, 2
    config.checkpoint_every, config.keep_checkpoints, config.cpu_devices = 1, 2, 8
    config.data.store, config.data.source, config.data.held_out = {store!r}, {source!r}, 0.2
    config.eval_batches = 1
    config.model.compute_dtype = "float32"
    return config
"""
LORA = ["--config.lora.rank=2"]
TEXT = "keys and values travel around the ring while queries stay. "
PAIRS = [(preset, checkpoint) for preset in TINY for checkpoint in TINY]


class Pair:
    """A preset and a converted checkpoint: the config, and the runs that were trained with it."""

    def __init__(self, preset: str, checkpoint: str, folder: Path):
        self.folder = folder / f"{preset}-{checkpoint}"
        self.folder.mkdir()
        self.theirs, self.ours = (folder / f"{checkpoint}-{kind}" for kind in ("theirs", "ours"))
        if not self.ours.is_dir():
            save_tiny(checkpoint, self.theirs)
            from_hf(self.theirs, self.ours)
        places = {"init_from": self.ours, "run_dir": self.folder / "run", "store": folder / "store"}
        values = {name: str(path) for name, path in places.items()} | {"source": f"jsonl:{folder}/rows.jsonl"}
        self.store = places["store"]
        self.config = self.folder / "config.py"
        self.config.write_text(CONFIG.format(preset=next(iter(FAMILIES[preset].presets)), **values))

    @cached_property
    def run(self) -> Path:
        """A run of all weights."""
        return self._train(self.folder / "run")

    @cached_property
    def adapters(self) -> Path:
        """A run of adapters."""
        return self._train(self.folder / "adapters", *LORA)

    def _train(self, run: Path, *words: str) -> Path:
        assert main(["train", f"--config={self.config}", f"--config.run_dir={run}", *words]) == 0
        return run

    def resume(self, run: Path, *words: str) -> None:
        """Train the last step of a run again."""
        before = saved_arrays(run, 2)
        shutil.rmtree(run / "checkpoints" / "2")
        self._train(run, *words)
        assert before and saved_arrays(run, 2) == before


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """`pairs(preset, checkpoint)`, the same `Pair` for all tests of the module."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"{i}: {TEXT * 4}"}) for i in range(30)))
    made: dict[tuple[str, str], Pair] = {}

    def pair(preset: str, checkpoint: str) -> Pair:
        if (preset, checkpoint) not in made:
            made[preset, checkpoint] = Pair(preset, checkpoint, folder)
        return made[preset, checkpoint]

    return pair


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "checkpoint"), PAIRS)
def test_a_run_is_the_checkpoint_s_model_and_is_resumed(preset, checkpoint, pairs):
    pair = pairs(preset, checkpoint)
    saved = json.loads((pair.run / "config.json").read_text())
    assert (saved["family"], saved["preset"]) == (checkpoint, next(iter(FAMILIES[preset].presets)))
    there, here = model_of(pair.ours), model_of(pair.run)
    assert type(here) is type(there)
    assert all(getattr(here, name) == getattr(there, name) for name in (*here.ARCHITECTURE, *here.INHERITED))
    pair.resume(pair.run)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "checkpoint"), PAIRS)
def test_adapters_are_trained_resumed_and_exported(preset, checkpoint, pairs):
    pair = pairs(preset, checkpoint)
    pair.resume(pair.adapters, *LORA)
    out = pair.folder / "merged"
    assert main(["convert", "to-hf", str(pair.adapters), str(out)]) == 0
    assert main(["convert", "verify", str(out), str(pair.adapters)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "checkpoint"), PAIRS)
def test_an_export_is_the_run_s_model(preset, checkpoint, pairs):
    pair = pairs(preset, checkpoint)
    out = pair.folder / "out"
    assert main(["convert", "to-hf", str(pair.run), str(out)]) == 0
    assert main(["convert", "verify", str(out), str(pair.run)]) == 0
    kept = "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "sliding_window", "layer_types"
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (pair.theirs, out))
    assert {name: ours.get(name) for name in kept} == {name: theirs.get(name) for name in kept}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "checkpoint"), PAIRS)
def test_a_run_answers_and_is_evaluated(preset, checkpoint, pairs, capsys):
    pair = pairs(preset, checkpoint)
    words = [f"--run={pair.run}", "--mesh_dim=1,1,1,1"]
    assert main(["generate", *words, f"--prompt={TEXT}", "--max_new_tokens=2", "--max_length=64"]) == 0
    assert main(["eval", "perplexity", *words, "--lengths=32", f"--store={pair.store}", "--last=16"]) == 0
    assert " 32 " in capsys.readouterr().out


@pytest.mark.usual("llama-llama", "llama-gemma3", "gemma3-qwen3", "smollm3-mistral")
@pytest.mark.parametrize(("preset", "checkpoint"), PAIRS)
def test_an_estimate_is_of_the_checkpoint_s_model(preset, checkpoint, pairs, capsys):
    """The same as with a preset of the checkpoint's own family."""
    reports = []
    for config in (pairs(preset, checkpoint).config, pairs(checkpoint, checkpoint).config):
        assert main(["estimate", f"--config={config}", "--target=v5e-8", "--json", "--closed_form"]) == 0
        reports.append(json.loads(capsys.readouterr().out) | {"model": ""})
    assert reports[0] == reports[1] and reports[0]["peak_bytes"] < 2**24
