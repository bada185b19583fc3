"""Documents begin as the tokenizer begins texts, or as the option says; older stores keep their meaning."""

import json
from dataclasses import replace

import numpy as np
import pytest
import transformers

from ringformer.cli import main
from ringformer.data import DocumentStream, WholeDocuments, build_stores, load_tokenizer, open_mixture, open_or_build
from ringformer.data.packing.buckets import LengthBuckets
from ringformer.data.packing.options import PackingOptions
from ringformer.data.sources.documents import Document
from ringformer.data.stores.beginning import describe_earlier, texts_begin
from ringformer.data.stores.options import StoreOptions
from ringformer.files.hashes import hash_object
from ringformer.files.manifest import write_manifest
from ringformer.runs.config import base_config
from ringformer.runs.config_file import load_config, parse
from tests.data.chat_samples import llama3, sentencepiece

TEXTS = ["The ring carries keys.", "A chat about values and keys. It carries on.", "<|begin_of_text|><s> is text"]
CONFIG = "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    return base_config('tiny')\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tokenizers, by name: two that begin texts with their BOS token, and two whose configs or files say otherwise."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in ("llama3", "llama3 without", "sp", "sp without"):
        (folder / name).mkdir()
    llama3(folder / "llama3")
    llama3(folder / "llama3 without")
    path = folder / "llama3 without" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    sentencepiece(folder / "sp")
    sentencepiece(folder / "sp without")
    (folder / "sp without" / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return folder


@pytest.fixture
def options(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return StoreOptions(f"jsonl:{tmp_path}/a.jsonl", held_out=0.0)


def documents_of(store):
    return [store.tokens[begin:end].tolist() for begin, end in zip(store.offsets, store.offsets[1:], strict=False)]


def make_earlier(folder):
    """Make a store look as an earlier version wrote it."""
    path = folder / "train" / "store.json"
    meta = json.loads(path.read_text())
    del meta["settings"]["begin"], meta["begun"], meta["checksum"]
    path.write_text(json.dumps(meta | {"checksum": hash_object(meta)}))
    report = json.loads((folder / "report.json").read_text())
    del report["begin"], report["train"]["begun"]
    (folder / "report.json").write_text(json.dumps(report))
    write_manifest(folder, but=[f"train/{name}" for name in meta["files"]])


@pytest.mark.parametrize("separator", ["", "\n###\n"])
@pytest.mark.parametrize(
    ("name", "begins"), [("llama3", True), ("llama3 without", False), ("sp", True), ("sp without", False)]
)
def test_documents_begin_as_the_tokenizer_or_the_option_says(tmp_path, folders, options, name, begins, separator):
    tokenizer = load_tokenizer(str(folders / name))
    end = tokenizer.encode(separator) if separator else [tokenizer.eos_id]
    prints = {}
    for begin, begun in (("tokenizer", begins), ("true", True), ("false", False)):
        chosen = replace(options, begin=begin, separator=separator)
        store, _ = open_or_build(tmp_path / begin, chosen, tokenizer)
        before = [tokenizer.bos_id] if begun else []
        assert documents_of(store) == [[*before, *tokenizer.encode(text), *end] for text in TEXTS]
        assert store.begun == len(TEXTS) * begun and store.meta["settings"]["begin"] is begun
        assert store.meta["utf8_bytes"] == sum(map(len, TEXTS)), "a token has no text"
        assert texts_begin([store], tokenizer) is begun
        prints[begin] = store.meta["fingerprint"]
    assert (prints["tokenizer"] == prints["true"]) == begins and prints["true"] != prints["false"]
    assert open_or_build(tmp_path / "tokenizer", replace(chosen, begin="true" if begins else "false"), tokenizer)
    with pytest.raises(ValueError, match=f"begin is {begins}, not {not begins}. To use them, set the same options"):
        open_or_build(tmp_path / "tokenizer", replace(chosen, begin="false" if begins else "true"), tokenizer)


def test_a_document_of_a_tokenizer_json_is_what_transformers_makes_of_its_text(tmp_path, folders, options):
    tokenizer = load_tokenizer(str(folders / "llama3"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folders / "llama3"))
    store, _ = open_or_build(tmp_path / "s", options, tokenizer)
    assert [ids[:-1] for ids in documents_of(store)[:2]] == [theirs(text).input_ids for text in TEXTS[:2]]
    plain, _ = open_or_build(tmp_path / "t", replace(options, begin="false"), tokenizer)
    assert documents_of(plain)[0][:-1] != theirs(TEXTS[0]).input_ids


def test_retrieval_tasks_are_within_the_begun_document(tmp_path, folders, options):
    tokenizer = load_tokenizer(str(folders / "sp"))
    store, _ = open_or_build(tmp_path / "s", replace(options, retrieval_tasks=2), tokenizer)
    assert sum(ids.count(tokenizer.bos_id) for ids in documents_of(store)) == len(TEXTS) == store.begun


@pytest.mark.parametrize("packing", ["stream", "whole", "buckets"])
def test_the_token_is_read_and_never_predicted(tmp_path, folders, packing):
    """In every packing a document's BOS token is at position 0 of its segment, and is no target that counts."""
    tokenizer = load_tokenizer(str(folders / "sp"))
    texts = [Document(f"The ring carries {i} keys.", "d") for i in range(40)]
    store, _ = build_stores(tmp_path / "s", texts, tokenizer, held_out=0.0)
    assert store.begun == 40, "the default without options, too"
    options = PackingOptions(packing="stream" if packing == "stream" else "whole", buckets=2 * (packing == "buckets"))
    if packing == "stream":
        sequences = DocumentStream(store, 64, 0, options)
    elif packing == "whole":
        sequences = WholeDocuments(store, 64, 0, options, batch_size=2)
    else:
        sequences = LengthBuckets(store, 64, 0, options, batch_size=2)
    begun = 0
    for index in range(sequences.per_epoch):
        batch = sequences.read(index, np.arange(64))
        text = ~batch.ends | batch.mask
        bos = (batch.tokens == tokenizer.bos_id) & text
        assert not batch.positions[bos].any() and batch.mask[bos].all(), "it predicts the first token of the text"
        assert not (batch.mask & (batch.targets == tokenizer.bos_id)).any()
        begun += int(bos.sum())
    assert begun == 40 or (packing != "whole" and begun >= 38), "an epoch leaves out a last part"


def test_true_needs_a_token(tmp_path, options):
    with pytest.raises(ValueError, match="begin='true': tokenizer bytes has no BOS token: leave out --begin"):
        open_or_build(tmp_path / "s", replace(options, begin="true"), load_tokenizer("bytes"))
    store, _ = open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    assert documents_of(store) == [[*text.encode(), 256] for text in TEXTS] and not store.begun


def test_a_store_of_an_earlier_version_keeps_its_meaning_and_says_it(tmp_path, folders, options, capsys):
    tokenizer, folder = load_tokenizer(str(folders / "llama3")), tmp_path / "s"
    words = ["data", "prepare", f"--store={folder}", f"--source={options.source}", "--held_out=0"]
    words.append(f"--tokenizer={folders / 'llama3'}")
    assert main([*words, "--begin=false"]) == 0
    assert "0 of the documents begin with <|begin_of_text|>" in capsys.readouterr().out
    make_earlier(folder)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "so its documents begin without <|begin_of_text|>" in out and "of the documents begin" not in out
    store, _ = open_or_build(folder, options, tokenizer)
    assert not store.begins_documents and texts_begin([store], tokenizer) is None
    assert open_or_build(folder, replace(options, begin="false"), tokenizer)
    with pytest.raises(ValueError, match="begin is False, not True"):
        open_or_build(folder, replace(options, begin="true"), tokenizer)
    assert main([*words[:2], f"--store={tmp_path}/new", *words[3:]]) == 0
    out = capsys.readouterr().out
    assert "3 of the documents begin with <|begin_of_text|>" in out and "without" not in out
    new, _ = open_or_build(tmp_path / "new", options, tokenizer)
    assert describe_earlier(new, tokenizer) == "" != describe_earlier(store, tokenizer)


def test_a_tokenizer_that_begins_nothing_has_nothing_to_say_of_an_earlier_store(tmp_path, options, capsys):
    store, _ = open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    make_earlier(tmp_path / "s")
    store, _ = open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    assert describe_earlier(store, load_tokenizer("bytes")) == ""


def test_a_run_has_the_option_of_the_store_that_it_names(tmp_path, folders, options):
    """As the record says; an earlier store has the default, whatever the file says, and opens."""
    tokenizer = load_tokenizer(str(folders / "llama3"))
    path = tmp_path / "config.py"
    path.write_text(
        CONFIG.replace(
            "return base_config('tiny')",
            "config = base_config('tiny')\n    config.data.begin = 'true'\n    return config",
        )
    )
    for name, begin in (("begun", "true"), ("not begun", "false"), ("earlier", "tokenizer")):
        open_or_build(tmp_path / name, replace(options, begin="true" if name == "begun" else "false"), tokenizer)
        if name == "earlier":
            make_earlier(tmp_path / name)
        words = [f"--config.data.store={tmp_path / name}", f"--config.data.tokenizer={folders / 'llama3'}"]
        data = parse(load_config(path, words), inherit=False).data
        assert data.begin == begin
        assert open_or_build(data.store, data, tokenizer)


def test_a_mixture_has_documents_that_begin_alike(tmp_path, folders, options):
    tokenizer = load_tokenizer(str(folders / "sp"))
    for name, begin in (("a", "tokenizer"), ("b", "false"), ("c", "true"), ("d", "false")):
        open_or_build(tmp_path / name, replace(options, begin=begin), tokenizer)
    make_earlier(tmp_path / "d")
    for other in "bd":
        with pytest.raises(ValueError, match=f"a/train begin with the tokenizer's BOS token, and those of .*{other}/"):
            open_mixture(f"{tmp_path}/a:1,{tmp_path}/{other}:1", tokenizer.name, held_out=False)
    for parts, begins in (("ac", True), ("bd", None), ("b", False)):
        text = ",".join(f"{tmp_path}/{part}:1" for part in parts)
        stores = [store for store, _ in open_mixture(text, tokenizer.name, held_out=False)[0]]
        assert texts_begin(stores, tokenizer) is begins


def test_chats_begin_as_their_template_writes_and_decide_without_documents(tmp_path, folders, options):
    chats = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a ring"}]}] * 3
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    conversations = replace(
        options, source=f"jsonl:{tmp_path}/chats.jsonl", format="messages", template="llama3", clean=""
    )
    for name, begins in (("llama3", True), ("llama3 without", False)):
        tokenizer = load_tokenizer(str(folders / name))
        store, _ = open_or_build(tmp_path / name, conversations, tokenizer)
        assert [ids.count(tokenizer.bos_id) for ids in documents_of(store)] == [1, 1, 1]
        assert "begin" not in store.meta["settings"] and store.begun == 3
        assert texts_begin([store], tokenizer) is begins, "a token of the template alone begins no text"
        plain, _ = open_or_build(tmp_path / f"plain {name}", replace(options, begin="false"), tokenizer)
        assert texts_begin([store, plain], tokenizer) is False, "documents decide"
    with pytest.raises(ValueError, match="begin='true' needs format='documents'"):
        replace(conversations, begin="true")


def test_a_config_has_the_option():
    assert base_config("tiny").data.begin == "tokenizer"
