"""Documents of a store begin as transformers begins their texts with the released tokenizers."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from ringformer.data import Document, build_stores, load_tokenizer
from tests.released.folders import TOKENIZERS, mistral_tokenizers, smol, tokenizer

TEXT = "The ring carries keys and values."
BEGINNINGS = {
    "llama3_1": "<|begin_of_text|>",
    "llama2": "<s>",
    "gemma3": "<bos>",
    "qwen3": "",
    "deepseek_v3": "",
    "gptoss": "",
    "smol": "",
}
"""Token that begins a text, by tokenizer; SmolLM2 and gpt-oss name a BOS token that they do not add."""


def check(folder, store_folder, begin):
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    store, _ = build_stores(store_folder, [Document(TEXT, "a document")], ours, held_out=0.0)
    ids = store.tokens[:].tolist()
    assert ids[:-1] == theirs(TEXT).input_ids and ids[-1] == ours.eos_id
    assert ids[:-1] == [*([ours.controls[begin]] if begin else []), *ours.encode(TEXT)]
    assert store.begun == bool(begin)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama2" else pytest.mark.slow) for name in BEGINNINGS]
)
def test_a_document_begins_as_transformers_begins_its_text(tmp_path, name):
    assert {*BEGINNINGS} == {*TOKENIZERS, "smol"}
    check(smol() if name == "smol" else tokenizer(name), tmp_path / "store", BEGINNINGS[name])


@pytest.mark.parametrize("adds", [True, False])
def test_a_sentencepiece_model_s_config_says_how_texts_begin(tmp_path, adds):
    shutil.copyfile(mistral_tokenizers() / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": adds}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    check(tmp_path, tmp_path / "store", "<s>" if adds else "")
