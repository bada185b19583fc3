"""Ids of answers that begin with white space, by a tokenizer that joins it with a template's newline."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers

from ringformer.data.chats.continued_ids import encode_answers
from ringformer.data.tokenizers.base import Segment
from ringformer.data.tokenizers.load import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, and tokens of two and three newlines, as those of SmolLM2."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ĊĊ", "ĊĊĊ", "<|end|>"])}
    made = HuggingFace(models.BPE(vocabulary, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return load_tokenizer(str(folder))


def chat(tokenizer, *answers):
    end = tokenizer.controls["<|end|>"]
    segments = []
    for answer in answers:
        segments += [Segment("user\nq"), Segment("<|end|>", False, end), Segment("assistant\n")]
        segments += [Segment(answer, True), Segment("<|end|>", True, end)]
    return segments


@pytest.mark.parametrize("answers", [("\n\nyes",), ("yes", "\n\nno"), ("\n\na", "b", "\n\n\nc")])
def test_an_answer_begins_behind_the_ids_of_its_prompt(tokenizer, answers):
    segments = chat(tokenizer, *answers)
    ((ids, trained),) = encode_answers(tokenizer, [segments])
    begins = np.flatnonzero(np.diff(trained.astype(int), prepend=0) == 1)
    newline = tokenizer.encode("\n")
    for answer, begin in zip(answers, begins, strict=True):
        assert ids[begin - 1] == newline[0]  # the template's, alone
        assert ids[begin:][: len(tokenizer.encode(answer))].tolist() == tokenizer.encode(answer)
    assert tokenizer.decode(ids) == "".join(f"user\nqassistant\n{answer}" for answer in answers)
    ((whole, _),) = tokenizer.encode_chats([segments])
    assert len(whole) < len(ids)  # the control: encoded in one piece, the newlines are joined


def test_other_sequences_are_encoded_as_ever(tokenizer):
    chats = [chat(tokenizer, "yes"), chat(tokenizer, " a", "b\n\n"), [Segment("plain")], []]
    for (ids, trained), (expected, mask) in zip(
        encode_answers(tokenizer, chats), tokenizer.encode_chats(chats), strict=True
    ):
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(trained, mask)


def test_a_tokenizer_that_changes_the_text_of_pieces_is_refused(tokenizer, monkeypatch):
    """As one would that puts a space before each piece of text."""
    monkeypatch.setattr(tokenizer, "decode", lambda ids: " ".join(map(str, ids)), raising=False)
    ((error),) = encode_answers(tokenizer, [chat(tokenizer, "\n\nyes")])
    assert isinstance(
        error, ValueError
    ) and "an answer, '\\n\\nyes', with the end of its prompt, 'assistant\\n'" in str(error)
