"""A checkpoint of every family is trained on rings, resumed, estimated, evaluated and continued, as LLaMA's are."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ringformer.checkpoints.saved_model import model_of
from ringformer.cli import main
from ringformer.convert import from_hf
from ringformer.data import ByteTokenizer
from ringformer.inference.generator import Generator
from ringformer.models.registry import FAMILIES
from tests.convert.families import FAMILIES as TINY
from tests.convert.families import save_tiny
from tests.train.runs import read_metrics, saved_arrays

CONFIG = """
from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.init_from, config.run_dir = {init_from!r}, {run_dir!r}
    config.mesh_dim, config.seq_len, config.batch_size, config.steps = "1,2,1,4", 128, 4, 4
    config.checkpoint_every, config.eval_every, config.eval_batches, config.cpu_devices = 2, 2, 2, 8
    config.data.store, config.data.source, config.data.packing = {store!r}, {source!r}, "whole"
    config.model.compute_dtype = "float32"
    return config
"""
TEXT = "keys and values travel around the ring while queries stay"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"text": f"{i}: " + TEXT * (1 + i % 4)} for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in TINY if family != "llama"])
def test_the_life_of_a_model(folder, family, tmp_path, capsys):
    save_tiny(family, tmp_path / "theirs")
    from_hf(tmp_path / "theirs", tmp_path / "ours")
    run, file = tmp_path / "run", tmp_path / "config.py"
    places = {"init_from": tmp_path / "ours", "run_dir": run, "store": folder / "store"}
    places = {name: str(path) for name, path in places.items()} | {"source": f"jsonl:{folder}/rows.jsonl"}
    file.write_text(CONFIG.format(**places))

    assert main(["train", f"--config={file}"]) == 0
    assert type(model_of(run)) is FAMILIES[family].config
    resumed_from_step(run, 2)
    before = saved_arrays(tmp_path / "before", 4)
    assert main(["train", f"--config={file}"]) == 0
    assert len(before) > 10 and saved_arrays(run, 4) == before
    losses = [row["loss"] for row in read_metrics(run) if "loss" in row]
    assert len(losses) >= 4 and np.isfinite(losses).all()

    assert main(["eval", "perplexity", f"--run={run}", "--lengths=128", f"--store={folder}/store", "--last=64"]) == 0
    assert "128" in capsys.readouterr().out
    assert main(["generate", f"--run={run}", f"--prompt={TEXT}", "--max_new_tokens=8", "--mesh_dim=1,1,1,8"]) == 0
    written = capsys.readouterr().out
    alone = Generator.load(run, mesh_dim="1,1,1,1", max_length=128, compute_dtype="float32")
    (tokens,) = alone.generate([list(TEXT.encode())], max_new_tokens=8)
    expected = ByteTokenizer().decode(list(itertools.takewhile(lambda token: token < 256, tokens)))
    written, expected = ("".join(c if c.isascii() else "?" for c in text) for text in (written, f"{expected}\n"))
    assert written == expected

    assert main(["estimate", f"--config={file}", "--target=v5e-8", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["fits"] and estimate["flops"] > 0 and not estimate["closed_form"]


def resumed_from_step(run: Path, step: int) -> None:
    """Set the run back to a checkpoint, and keep a copy of how it ended."""
    shutil.copytree(run, run.parent / "before")
    for newer in (run / "checkpoints").iterdir():
        if newer.name.isdigit() and int(newer.name) > step:
            shutil.rmtree(newer)
