"""`tokenizer.json` files: the ids of transformers, named by content, control tokens never made of text."""

import json

import pytest
import tokenizers

from ringformer.data import Segment, load_tokenizer
from tests.data.chat_samples import SPECIAL
from tests.data.tokenizers.texts import TEXTS


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


def test_tokenizer_files_that_cannot_be_used(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    description = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match=r"eos_token '</s>', which a file beside .* is not a special token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).eos_id == description["added_tokens"][1]["id"], "<|end_of_text|>"
    description["added_tokens"] = description["added_tokens"][2:3]
    description["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"does not define which token ends a document.*start_header"):
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
