"""A converted model is what `init_from` begins with, and a run of it goes back to transformers."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.checkpoints.saved_model import restore_params
from ringformer.convert import from_hf, to_hf
from ringformer.inference.generator import load_model
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train.evaluation import evaluate
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.convert.models import load, logits, save_model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(30):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(["ring", "block", "key"], rng.integers(50, 400))))
    return folder


@pytest.mark.slow
def test_from_transformers_through_a_run_to_transformers(corpus, tmp_path):
    """On a mesh that pads the weights; YaRN and the context go along."""
    theirs = save_model(tmp_path / "theirs", "yarn_changed", intermediate_size=81)
    (theirs / "tokenizer_config.json").write_text("{}")
    model = from_hf(theirs, tmp_path / "ours", "bfloat16")
    config = Config(
        model=dataclasses.replace(model, compute_dtype="float32", ffn_chunk=64, loss_chunk=64),
        data=DataConfig(store=str(tmp_path / "store"), source=f"text:{corpus}/*.txt", held_out=0.3),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        run_dir=str(tmp_path / "run"),
        init_from=str(tmp_path / "ours"),
        mesh_dim="1,2,1,4",
        seq_len=1024,
        batch_size=2,
        steps=2,
        eval_batches=1,
    )
    with pytest.raises(ValueError, match="is a converted model: name it with init_from"):
        prepare(dataclasses.replace(config, run_dir=config.init_from))
    run = prepare(config)
    (tmp_path / "ours" / "chat_template.jinja").symlink_to(tmp_path / "store" / "train" / "meta.json")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is a link to .*, outside its folder"):
        train(run)
    (tmp_path / "ours" / "chat_template.jinja").unlink()
    train(run)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    params = restore_params(config.init_from, run.program.shardings.params, run.program.mesh)
    assert first["step"] == 0
    again = evaluate(run.program.eval_step, params, run.eval_data, run.config.eval_batches, run.program.batch_sharding)
    assert first["eval_loss"] == pytest.approx(again["eval_loss"], rel=1e-6)

    to_hf(config.run_dir, tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer_config.json").is_file()
    back = load(tmp_path / "back")
    assert back.config.max_position_embeddings == 1024 and back.config.rope_parameters["mscale"] == 0.7
    tokens = np.random.default_rng(0).integers(0, 257, (1, 128))
    found = jax.jit(lambda model, tokens: model(tokens))(load_model(config.run_dir), jnp.asarray(tokens, jnp.int32))
    assert np.abs(logits(back, tokens) - found).max() <= 1e-4
    assert np.abs(logits(load(theirs), tokens) - found).max() > 1e-2


@pytest.mark.slow
def test_a_run_with_a_tokenizer_of_its_own_names_its_end_of_a_document(corpus, tmp_path):
    folder = save_model(tmp_path / "theirs", "llama_1")
    model = from_hf(folder, tmp_path / "ours")
    config = Config(
        model=dataclasses.replace(model, compute_dtype="float32"),
        data=DataConfig(store=str(tmp_path / "store"), source=f"text:{corpus}/*.txt", held_out=0.0),
        optimizer=OptimizerConfig(warmup_steps=0),
        run_dir=str(tmp_path / "run"),
        mesh_dim="1,8,1,1",
        seq_len=64,
        batch_size=8,
        steps=1,
    )
    train(prepare(config))
    to_hf(config.run_dir, tmp_path / "back")
    described = json.loads(Path(tmp_path / "back" / "config.json").read_text())
    assert (described["eos_token_id"], described["bos_token_id"]) == (256, None)
    assert described["max_position_embeddings"] == 64
