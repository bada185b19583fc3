"""Tokenizers give text back exactly, and name what they cannot do."""

import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from ringformer.data import (
    ByteTokenizer,
    Segment,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
)
from tests.data.chat_samples import SPECIAL, llama3, sentencepiece

STDLIB = Path(sysconfig.get_path("stdlib"))
CODE = [(STDLIB / name).read_text(encoding="utf-8") for name in ("ast.py", "json/decoder.py", "textwrap.py")]
TEXTS = [
    *CODE,
    "\tif x:\n\t\treturn  1\r\n\n    \n",
    "  two spaces before and after  ",
    "naïve café, 日本語, 🙂, e\u0301, no-break\u00a0space, ideographic\u3000space",
    "control \0 \x1b and </s> <s> <unk> <0x0A> as text",
    "",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "code.model"
    train_sentencepiece(iter(CODE), path, vocab_size=600)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama3(tmp_path_factory.mktemp("l3"))


@pytest.fixture(params=["bytes", "model", "folder"])
def tokenizer(request):
    return load_tokenizer("bytes" if request.param == "bytes" else str(request.getfixturevalue(request.param)))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_decode_undoes_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array([*ids, tokenizer.eos_id])) == text


def test_texts_put_end_to_end_stay_so(tokenizer):
    parts = ["def f(x):", " ", "return", " x\n", "    ", "é"]
    assert tokenizer.decode([i for part in parts for i in tokenizer.encode(part)]) == "".join(parts)


def test_batch_equals_one_by_one(tokenizer):
    batch = tokenizer.encode_batch(TEXTS)
    assert [list(ids) for ids in batch] == [tokenizer.encode(text) for text in TEXTS]
    assert all(np.issubdtype(ids.dtype, np.integer) for ids in batch)


def test_bytes_are_utf8_and_one_more():
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id) == ("bytes", 257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]


def test_any_bytes_survive_decoding():
    ids = [0xFF, 97, 0xC3, 0x80, 0xED, 0xA0, 0x80]
    assert ByteTokenizer().encode(ByteTokenizer().decode(ids)) == ids


@pytest.mark.parametrize("bad", [-1, 257])
def test_an_id_outside_the_bytes_is_named(bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 257"):
        ByteTokenizer().decode([97, bad])


def test_sentencepiece_merges_and_is_named_by_content(model, tmp_path):
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode(CODE[0])) < 0.6 * len(CODE[0])
    assert len(tokenizer.encode(" " * 8)) <= 2, "indentation is merged"
    copy = tmp_path / "other.model"
    copy.write_bytes(model.read_bytes())
    assert load_tokenizer(str(copy)).name == tokenizer.name
    train_sentencepiece(CODE, copy, vocab_size=500)
    assert load_tokenizer(str(copy)).name != tokenizer.name


def test_training_says_nothing(tmp_path, capfd):
    train_sentencepiece(CODE[2:], tmp_path / "a.model", vocab_size=400)
    assert capfd.readouterr() == ("", "")


def test_training_reports_an_impossible_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=100 "):
        train_sentencepiece(CODE, tmp_path / "a.model", vocab_size=100)
    with pytest.raises(ValueError, match=r"does not end in \.model"):
        train_sentencepiece(CODE, tmp_path / "a.bin", vocab_size=400)
    assert not list(tmp_path.iterdir())


def test_a_model_without_end_token_is_refused(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE[0].splitlines()),
        model_prefix=str(tmp_path / "m"),
        vocab_size=400,
        model_type="bpe",
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="no end-of-sentence token"):
        load_tokenizer(str(tmp_path / "m.model"))


def test_load_tokenizer_says_what_it_accepts(tmp_path):
    with pytest.raises(ValueError, match=r"unknown tokenizer 'gpt2'; accepted: 'bytes', .*\.model.* tokenizer\.json"):
        load_tokenizer("gpt2")
    missing = str(tmp_path / "none.model")
    with pytest.raises(FileNotFoundError, match=re.escape(missing)):
        load_tokenizer(missing)
    (tmp_path / "none.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        load_tokenizer(missing)


def test_check_vocabulary():
    check_vocabulary(ByteTokenizer(), 257)
    with pytest.raises(ValueError, match=r"257 tokens.* 256"):
        check_vocabulary(ByteTokenizer(), 256)


def test_a_tokenizer_json_agrees_with_transformers(folder):
    """Its ids are those of transformers, which also must be told to take special tokens in text for text."""
    transformers = pytest.importorskip("transformers")
    ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in [*TEXTS, "".join(SPECIAL)]:
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == expected
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.controls == {name: theirs.convert_tokens_to_ids(name) for name in SPECIAL}


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


def test_tokenizer_files_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    description = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match=r"eos_token '</s>' of .*config\.json is no special token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).eos_id == description["added_tokens"][1]["id"], "<|end_of_text|>"
    description["added_tokens"] = description["added_tokens"][2:3]
    description["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"does not say which token ends a document.*start_header"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UnicodeEncodeError):
        load_tokenizer(str(folder)).encode_batch(["good", "\udcff"])
    with pytest.raises(UnicodeEncodeError):
        load_tokenizer(str(folder)).encode("\udcff")


def test_special_tokens_of_a_unigram_model_are_no_text(tmp_path):
    """Its vocabulary holds them as pieces, which a search for the best pieces would find in text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -2.0) for c in "abc</s> ")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(str(tmp_path))
    assert ours.eos_id == 1
    assert 1 not in ours.encode("ab</s>c") and len(ours.encode("ab</s>c")) == 7
    segments = [Segment("a</s>"), Segment("b"), Segment("</s>", True, 1)]
    ((ids, trained),) = ours.encode_chats([segments])
    assert (ids == 1).tolist() == trained.tolist() == [False] * 6 + [True]
