"""Special tokens, ends of texts and contexts of folders that describe them in odd ways, as transformers has them."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from ringformer.convert.hf_config import text_config
from ringformer.data import Segment, load_tokenizer, save_tokenizer, train_sentencepiece
from ringformer.data.tokenizers.special_tokens import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    special_names,
)
from ringformer.data.tokenizers.special_tokens import model_tokens as read_model_tokens
from tests.data.chat_samples import CORPUS

CONFIG = "config.json"
END, BEGIN, TURN, PLAIN = "</s>", "<s>", "<|eot|>", "<|im_end|>"
IDS = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "<|piece|>": 4, END: 5, BEGIN: 6, PLAIN: 7, TURN: 8}
VOCABULARY = 16
"""Rows of the models, more than their tokenizers have tokens."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
GEMMA = {"model_type": "gemma3_text", **SIZES}
WRAPPER = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": GEMMA}


def described(name: str, **more) -> dict:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": name, **off, **more}


def folder_of(path: Path, **files) -> Path:
    """A folder with a tokenizer.json, and JSON objects by the stem of their file."""
    vocab = {name: i for name, i in IDS.items() if i < IDS[END]}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="<unk>"))
    for name in (END, BEGIN, PLAIN, TURN):
        tokenizer.add_tokens([AddedToken(name, special=name != PLAIN, normalized=False)])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        if stem == "tokenizer_config":
            content = {"tokenizer_class": "PreTrainedTokenizerFast"} | content
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


def flags(name: str, special: bool) -> dict:
    return {str(IDS[name]): described(name, special=special)}


NAMED = {
    "a string": {"tokenizer_config": {"eos_token": TURN}},
    "an AddedToken": {"tokenizer_config": {"eos_token": described(TURN, __type="AddedToken", special=True)}},
    "in the map alone": {"tokenizer_config": {}, "special_tokens_map": {"eos_token": TURN}},
    "in the map, described": {"tokenizer_config": {}, "special_tokens_map": {"eos_token": described(TURN)}},
    "in the map, and no config": {"special_tokens_map": {"eos_token": TURN, "bos_token": BEGIN}},
    "the map overrides": {"tokenizer_config": {"eos_token": END}, "special_tokens_map": {"eos_token": TURN}},
    "null in the config": {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": TURN}},
    "a map that is not read": {
        "tokenizer_config": {"eos_token": TURN, "added_tokens_decoder": flags(END, True)},
        "special_tokens_map": {"eos_token": END},
    },
    "not flagged special": {"tokenizer_config": {"eos_token": PLAIN}},
    "not flagged special, twice": {
        "tokenizer_config": {"eos_token": PLAIN, "added_tokens_decoder": flags(PLAIN, False)}
    },
    "flagged by added_tokens_decoder": {
        "tokenizer_config": {"eos_token": END, "added_tokens_decoder": flags(PLAIN, True)}
    },
    "another token not flagged special": {"tokenizer_config": {"eos_token": END, "pad_token": PLAIN}},
    "a token of one model": {"tokenizer_config": {"eos_token": END, "extra_special_tokens": {"turn_token": PLAIN}}},
    "a piece of the vocabulary": {"tokenizer_config": {"eos_token": "<|piece|>"}},
    "ids of a model elsewhere": {"tokenizer_config": {"eos_token": END}, "config": LLAMA | {"eos_token_id": [1, 8]}},
}
"""Files of folders whose tokenizers name their end token."""


@pytest.mark.parametrize("name", NAMED)
def test_the_end_token_and_what_is_special_are_those_of_transformers(name, tmp_path):
    folder = folder_of(tmp_path / "odd", **NAMED[name])
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    if theirs.bos_token is not None:
        assert ours.bos_id == theirs.bos_token_id
    special = {ours.controls[token] for token in theirs.all_special_tokens}
    for i in IDS.values():
        expected = theirs.decode([i], skip_special_tokens=True)
        assert ours.decode([i]) == expected, "a special token has no text"
        assert (ours.byte_lengths[i] > 0) == bool(expected)
        assert i not in special or not expected
    text = "".join(IDS)
    assert not special & set(ours.encode(text)), "text is no special token"
    end = next(token for token, i in ours.controls.items() if i == ours.eos_id)
    ((ids, _),) = ours.encode_chats([[Segment("ab"), Segment(end, control=ours.eos_id)]])
    assert ids.tolist() == [IDS["ab"], theirs.eos_token_id]

    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / SPECIAL_TOKENS_MAP).write_text(json.dumps({"eos_token": BEGIN}))  # of another tokenizer
    save_tokenizer(ours, tmp_path / "copy")
    copy = load_tokenizer(str(tmp_path / "copy"))
    assert (copy.name, copy.eos_id, copy.controls, copy.config) == (ours.name, ours.eos_id, ours.controls, ours.config)


@pytest.mark.parametrize("token", [{"special": True}, {"special": True, "content": 7}, 7])
def test_a_description_without_a_name_flags_nothing(token):
    assert special_names({"added_tokens_decoder": {"9": token}}).special == frozenset()


def test_tokens_that_are_special_are_part_of_a_tokenizer_s_name(tmp_path):
    """Their names are encoded as other tokens, so that a store is of one of the two."""
    plain, flagged, ended = (
        load_tokenizer(str(folder_of(tmp_path / str(i), **NAMED[name])))
        for i, name in enumerate(("ids of a model elsewhere", "another token not flagged special", "a string"))
    )
    assert plain.eos_id == flagged.eos_id and len({plain.name, flagged.name, ended.name}) == 3
    assert plain.encode(PLAIN) == [IDS[PLAIN]] != flagged.encode(PLAIN)


@pytest.mark.parametrize("config", [LLAMA | {"eos_token_id": [8]}, WRAPPER | {"text_config": {"eos_token_id": 8}}])
def test_an_id_of_the_model_names_no_token_of_a_tokenizer(config, tmp_path):
    """A usual name counts if the model does not contradict it; transformers has no end token in either case."""
    folder = folder_of(tmp_path / "odd", tokenizer_config={}, config=config)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is None
    with pytest.raises(
        ValueError, match=r"which token ends a document \(in config\.json, '<\|eot\|>'\); set eos_token"
    ):
        load_tokenizer(str(folder))
    (folder / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": TURN}))
    assert load_tokenizer(str(folder)).eos_id == 8, "the advice"
    (folder / TOKENIZER_CONFIG).unlink()
    for usual in ({}, LLAMA | {"eos_token_id": [8, 5]}, LLAMA | {"eos_token_id": None}):
        (folder / CONFIG).write_text(json.dumps(usual))
        assert load_tokenizer(str(folder)).eos_id == IDS[END]


@pytest.mark.parametrize("flagged", [False, True])
def test_an_end_token_that_the_tokenizer_lacks_is_refused(flagged, tmp_path):
    decoder = {"added_tokens_decoder": {"9": described("<|new|>", special=True)}} if flagged else {}
    folder = folder_of(tmp_path / "odd", tokenizer_config={"eos_token": "<|new|>", **decoder})
    with pytest.raises(
        ValueError, match=r"eos_token '<\|new\|>', which .* is not a special token.*AutoTokenizer\."
    ) as e:
        load_tokenizer(str(folder))
    eval(str(e.value).rpartition(": ")[2])
    assert load_tokenizer(str(folder)).eos_id == AutoTokenizer.from_pretrained(folder).eos_token_id == 9


@pytest.mark.parametrize("token", [8, [TURN], "b", "ab", {"content": 8}], ids=str)
def test_what_cannot_be_an_end_token_is_refused(token, tmp_path):
    """A number, a list, and pieces of text: a text would lose them, or end."""
    folder = folder_of(tmp_path / "odd", tokenizer_config={"eos_token": token})
    with pytest.raises(ValueError, match=r"is not a special token of it: name one of </s>, <s>, <\|eot\|> in tok\S+$"):
        load_tokenizer(str(folder))


def test_the_end_token_of_a_sentencepiece_model_is_the_one_that_is_named(tmp_path):
    train_sentencepiece(CORPUS, tmp_path / "tokenizer.model", vocab_size=330)
    own = load_tokenizer(str(tmp_path))
    for named, end in ((None, own.eos_id), ("", own.eos_id), ("</s>", own.eos_id), ("<s>", own.bos_id)):
        (tmp_path / SPECIAL_TOKENS_MAP).write_text(json.dumps({"eos_token": named}))
        loaded = load_tokenizer(str(tmp_path))
        assert loaded.eos_id == end and (loaded.name == own.name) == (end == own.eos_id)
    (tmp_path / SPECIAL_TOKENS_MAP).write_text(json.dumps({"eos_token": PLAIN}))
    with pytest.raises(ValueError, match=r"eos_token '<\|im_end\|>', which .* is not a control token of it: name one"):
        load_tokenizer(str(tmp_path))


ENDS = {
    "one id": {"config": LLAMA | {"eos_token_id": 8}},
    "a list": {"config": LLAMA | {"eos_token_id": [5, 8]}},
    "no key": {"config": LLAMA},
    "null": {"config": LLAMA | {"eos_token_id": None}},
    "generation_config overrides": {
        "config": LLAMA | {"eos_token_id": 8},
        "generation_config": {"eos_token_id": [5, 7]},
    },
    "generation_config without ends": {"config": LLAMA | {"eos_token_id": 8}, "generation_config": {"bos_token_id": 6}},
    "generation_config with null": {"config": LLAMA | {"eos_token_id": 8}, "generation_config": {"eos_token_id": None}},
    "outside of text_config": {"config": WRAPPER | {"eos_token_id": [1, 8]}},
    "inside of text_config": {"config": WRAPPER | {"text_config": GEMMA | {"eos_token_id": [5, 7]}}},
    "outside and inside": {"config": WRAPPER | {"eos_token_id": 8, "text_config": GEMMA | {"eos_token_id": 7}}},
    "null outside": {"config": WRAPPER | {"eos_token_id": None, "text_config": GEMMA | {"eos_token_id": 7}}},
    "null in both": {"config": WRAPPER | {"eos_token_id": None, "text_config": GEMMA | {"eos_token_id": None}}},
}
"""Files of folders with the ends of a model's texts."""


class Theirs(NamedTuple):
    ends: set[int]
    context: int


def of_transformers(folder: Path) -> Theirs:
    """Ends and context of a model that transformers loads from the folder."""
    config = AutoConfig.from_pretrained(folder)
    if (folder / GENERATION_CONFIG).is_file():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    listed = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return Theirs(set(listed), config.get_text_config().max_position_embeddings)


def model_tokens(folder: Path, vocab_size: int = VOCABULARY):
    _, family = text_config(json.loads((folder / CONFIG).read_text()))
    assert family.hugging_face is not None
    return read_model_tokens(folder, CONFIG, vocab_size, family.hugging_face.absent)


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_a_model_s_texts_are_those_of_transformers(name, tmp_path):
    folder = folder_of(tmp_path / "odd", **ENDS[name])
    assert model_tokens(folder) == of_transformers(folder)


@pytest.mark.parametrize("wrong", [VOCABULARY, [5, 99], -1, "5", True, [[5]], {}], ids=str)
@pytest.mark.parametrize("stem", ["config", "generation_config"])
def test_an_end_that_is_no_token_of_the_model_is_refused(wrong, stem, tmp_path):
    folder = folder_of(tmp_path / "odd", **{"config": LLAMA, stem: LLAMA | {"eos_token_id": wrong}})
    message = (
        rf"odd/{stem}\.json: eos_token_id .* (is beyond the model's vocabulary of 16 tokens|is not a token id): corr"
    )
    with pytest.raises(ValueError, match=message):
        model_tokens(folder)
    if wrong == VOCABULARY:
        assert model_tokens(folder, VOCABULARY + 1).ends == {VOCABULARY}


def test_a_folder_without_files_has_no_ends_and_no_context(tmp_path):
    assert read_model_tokens(tmp_path, CONFIG, VOCABULARY, {"eos_token_id": 2}) == (frozenset(), None)
