"""Tokenizers by name or path, and copies of their files."""

import json
import re

import pytest

from ringformer.data import load_tokenizer, save_tokenizer
from tests.data.chat_samples import sentencepiece


def test_load_tokenizer_says_what_it_accepts(tmp_path):
    with pytest.raises(ValueError, match=r"unknown tokenizer 'gpt2'; accepted: 'bytes', .*\.model.* tokenizer\.json"):
        load_tokenizer("gpt2")
    missing = str(tmp_path / "none.model")
    with pytest.raises(FileNotFoundError, match=re.escape(missing)):
        load_tokenizer(missing)
    (tmp_path / "none.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        load_tokenizer(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_tokenizer_json_is_named_by_content_and_copied_whole(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder))
    assert load_tokenizer(str(folder / "tokenizer.json")).name == tokenizer.name
    save_tokenizer(tokenizer, tmp_path)
    copy = load_tokenizer(str(tmp_path))
    assert (copy.name, copy.config) == (tokenizer.name, tokenizer.config)
    config = tokenizer.config | {"eos_token": {"__type": "AddedToken", "content": "<|end_of_text|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("from a file")
    other = load_tokenizer(str(tmp_path))
    assert other.eos_id == other.controls["<|end_of_text|>"] and other.name != tokenizer.name
    assert other.config["chat_template"] == "from a file"
    (tmp_path / "again").mkdir()
    save_tokenizer(other, tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).config == other.config


def test_a_model_file_keeps_its_name_and_template(tmp_path):
    model = sentencepiece(tmp_path)
    model.rename(tmp_path / "mine.model")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "t"}')
    (tmp_path / "copy").mkdir()
    save_tokenizer(load_tokenizer(str(tmp_path / "mine.model")), tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.model").is_file()
    assert load_tokenizer(str(tmp_path / "copy")).config == {"chat_template": "t"}
