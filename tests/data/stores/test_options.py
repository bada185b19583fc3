"""Options of stores: what cannot be is refused, under the names that a config has for it; help names all there is."""

import json
from dataclasses import replace
from typing import get_args

import pytest

from ringformer.cli.dataclass_flags import field_docs
from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.chats.cleaning import RULES
from ringformer.data.chats.conversations import FORMATS
from ringformer.data.chats.templates import TEMPLATES, TemplateName
from ringformer.data.sources.source_files import KINDS
from ringformer.data.stores.options import Format, StoreOptions
from ringformer.files.hashes import hash_object
from ringformer.files.manifest import write_manifest
from ringformer.runs.config import DataConfig
from ringformer.runs.config_file import load_config, parse

WRONG = [
    ({"held_out": 1.0}, r"{}held_out=1.0 must be in \[0, 1\)"),
    ({"held_out": -0.1}, r"{}held_out=-0.1 must be in \[0, 1\)"),
    ({"format": "dolly"}, "unknown {}format 'dolly'; known: documents, tokens, sharegpt, messages, alpaca, prompt"),
    ({"format": "tokens", "separator": "\n"}, "{}separator='\\\\n' needs {}format='documents'"),
    ({"format": "tokens", "weight_field": "w"}, "{}weight_field='w': rows of tokens have no weights"),
    ({"compressibility_tails": 0.5}, r"{}compressibility_tails=0.5 must be in \[0, 0.5\)"),
    ({"retrieval_tasks": -1}, "{}retrieval_tasks=-1 must not be negative"),
    ({"template": "chatml"}, "unknown {}template 'chatml'; known: vicuna, llama2, llama3, tokenizer"),
    ({"chat_length": -1}, "{}chat_length=-1 must be positive, or 0 for no limit"),
    ({"max_document_bytes": 0}, "{}max_document_bytes=0 must be at least 1"),
    ({"chat_date": "26 Jul 2024"}, "{}chat_date='26 Jul 2024' is not a date like 2026-11-22"),
    (
        {"template_option": "a=1", "format": "messages"},
        "{}template_option='a=1' needs {}template='tokenizer' and a {}f",
    ),
    ({"rewritten": "last", "format": "messages"}, "{}rewritten='last' needs {}template='tokenizer' and a {}format of"),
    ({"rewritten": "last", "template": "tokenizer"}, "{}rewritten='last' needs {}template='tokenizer' and a {}format "),
    ({"rewritten": "all", "template": "tokenizer"}, "unknown {}rewritten 'all'; known: split, last, refuse"),
    ({"encoding": "utf-9"}, "encoding 'utf-9' is unknown; known are Python's, such as utf-8, utf-16, "),
    ({"encoding": "utf-8,rot13"}, "encoding 'rot13' is unknown"),
    ({"clean": "html,merge,short"}, "{}clean='html,merge,short': merge, short cannot clean documents"),
    ({"clean": "html", "format": "tokens"}, "{}clean='html': html cannot clean tokens"),
    ({"clean": "html,all"}, "unknown cleaning rule 'all'; known: html, "),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^{message.replace('{}', '')}"):
        StoreOptions("stdlib", **wrong)
    with pytest.raises(ValueError, match=f"^{message.replace('{}', 'data.')}"):
        DataConfig(store="s", **wrong)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("source", KINDS),
        ("format", ("documents", "tokens", *FORMATS)),
        ("template", get_args(TemplateName)),
        ("clean", RULES),
    ],
)
def test_the_help_of_a_field_names_its_values(field, values):
    help_text = field_docs(StoreOptions)[field]
    assert [value for value in values if value not in help_text] == []


def test_types_name_the_same_values_as_tables():
    assert get_args(Format) == ("documents", "tokens", *FORMATS)
    assert get_args(TemplateName) == (*TEMPLATES, "tokenizer")


def test_a_store_of_an_earlier_version_has_none_of_the_later_options(tmp_path):
    """It opens with the defaults, and with the config of chats that cleans them and skips malformed ones."""
    (tmp_path / "a.txt").write_text("text")
    options = StoreOptions(f"text:{tmp_path}/a.txt", held_out=0.0)
    open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    path = tmp_path / "s" / "train" / "store.json"
    meta = json.loads(path.read_text())
    for name in ("clean", "encoding", "skip_malformed"):
        del meta["settings"][name]
    del meta["checksum"]
    path.write_text(json.dumps(meta | {"checksum": hash_object(meta)}))
    write_manifest(tmp_path / "s", but=[f"train/{name}" for name in meta["files"]])
    assert open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    earlier = replace(options, clean="html,unprintable,duplicate")  # the default of earlier versions
    assert open_or_build(tmp_path / "s", earlier, load_tokenizer("bytes"))
    with pytest.raises(ValueError, match="skip_malformed is False, not True; clean is '', not 'html'"):
        others = replace(options, clean="html", skip_malformed=True)
        open_or_build(tmp_path / "s", others, load_tokenizer("bytes"))
    (tmp_path / "config.py").write_text(
        "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    config = base_config('tiny')\n"
        "    config.data.format = 'messages'\n    config.data.clean = 'short'\n"
        "    config.data.skip_malformed = True\n    return config\n"
    )
    named = [f"--config.data.store={tmp_path}/s", "--config.data.tokenizer=bytes"]
    data = parse(load_config(tmp_path / "config.py", named), inherit=False).data
    assert (data.format, data.clean, data.skip_malformed) == ("documents", "usual", False)
    assert open_or_build(tmp_path / "s", data, load_tokenizer("bytes"))


def test_an_encoding_is_of_files_of_text():
    """Also of Python's library and of installed packages, whose files may have another."""
    for source in ("text:a", "jsonl:a", "stdlib", "installed"):
        assert StoreOptions(source=source, encoding="utf-8,latin-1").encoding
    with pytest.raises(
        ValueError, match="encoding='utf-8' needs a source of text, jsonl, json, stdlib, installed, not"
    ):
        StoreOptions(source="parquet:a", encoding="utf-8")
