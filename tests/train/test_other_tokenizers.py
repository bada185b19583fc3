"""A run on the tokens of another tokenizer than its model's is refused, unless the user allows it."""

import re

import pytest

from ringformer.convert import to_hf
from ringformer.data import load_tokenizer
from ringformer.data.tokenizers.special_tokens import MODEL_IDS
from ringformer.files.untrusted import read_object
from ringformer.inference.text.run_text import RunText
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse, parse_stages
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from ringformer.train.stages import prepare_stages
from tests.inference.runs import model_folder

ALLOW = ["data.tokenizer"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted model with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_text("the ring carries blocks of keys and values around " * 200)
    return model_folder(folder / "ours")


def config(converted, folder, tokenizer="bytes", store="bytes"):
    """A run on a new store, made with a tokenizer."""
    values = base_config("tiny")
    values.init_from, values.run_dir = str(converted), str(folder / "run")
    values.update({"seq_len": 64, "batch_size": 8, "steps": 1, "mesh_dim": "1,-1,1,1"})
    values.optimizer.schedule = "constant"
    values.data.update({"source": f"text:{converted.parent}/text.txt", "held_out": 0.0})
    values.data.tokenizer, values.data.store = str(tokenizer), str(folder / store)
    return values


def refusal(run, theirs, named, ours) -> str:
    """The pattern of a message that names both tokenizers and what to set."""
    parts = (
        f"{run} was trained with tokenizer {theirs}, but data.tokenizer={named} is {ours}, whose ids mean another "
        f"text: set --config.data.tokenizer={'bytes' if theirs == 'bytes' else run} and a new --config.data.store"
    )
    return re.escape(parts)


def test_bytes_for_a_model_with_a_tokenizer_are_refused_and_the_advice_works(converted, tmp_path):
    theirs = load_tokenizer(str(converted)).name
    message = refusal(converted, theirs, "bytes", "bytes")
    values = config(converted, tmp_path)
    adapters, staged = config(converted, tmp_path), config(converted, tmp_path)
    adapters.lora.rank = 2
    staged.stages = ({"seq_len": 64}, {"seq_len": 128})
    for run in (values, adapters):
        with pytest.raises(ValueError, match=message):
            prepare(parse(run))
    with pytest.raises(ValueError, match=f"stage 1: {message}"):
        prepare_stages(parse_stages(staged))
    assert not (tmp_path / "bytes").exists()  # refused before a store is built
    assert prepare(parse(values), ALLOW).tokenizer.name == "bytes"
    values.data.update({"tokenizer": str(converted), "store": str(tmp_path / "new")})
    assert prepare(parse(values)).tokenizer.name == theirs
    file = config(converted, tmp_path, converted / "tokenizer.json", "new")
    assert prepare(parse(file)).tokenizer.name == theirs


def test_a_run_goes_on_with_the_tokenizer_that_it_was_allowed(converted, tmp_path):
    """It records that one: the next run begins with it, and no longer with the converted model's."""
    values = config(converted, tmp_path)
    train(prepare(parse(values), ALLOW))
    model, text = (RunText(folder) for folder in (converted, tmp_path / "run"))
    assert model.end_tokens == {4} and text.end_tokens == {256}, "ids of the other tokenizer mean nothing"
    to_hf(tmp_path / "run", tmp_path / "exported")
    ids = {key: read_object(tmp_path / "exported", "config.json")[key] for key in MODEL_IDS}
    assert ids == {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    assert not (tmp_path / "exported" / "tokenizer.json").exists()
    values.steps = 2
    assert prepare(parse(values)).checked.step == 1
    after = config(tmp_path / "run", tmp_path / "after")
    after.data.source = values.data.source
    assert prepare(parse(after)).tokenizer.name == "bytes"
    theirs = config(tmp_path / "run", tmp_path / "theirs", converted, "theirs")
    theirs.data.source = values.data.source
    ours = load_tokenizer(str(converted)).name
    with pytest.raises(ValueError, match=refusal(tmp_path / "run", "bytes", converted, ours)):
        prepare(parse(theirs))
