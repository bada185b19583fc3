"""Every tokenizer gives text back exactly, one text or many, and makes no control token of it."""

import numpy as np
import pytest

from ringformer.data import ByteTokenizer, check_vocabulary
from tests.data.chat_samples import SPECIAL
from tests.data.tokenizers.texts import TEXTS


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


def test_text_makes_no_control_tokens(tokenizer):
    text = "".join([*SPECIAL, "<s></s><unk>"]) + "end"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert not set(ids) & set(tokenizer.controls.values())
        assert tokenizer.decode(ids) == text


def test_check_vocabulary():
    check_vocabulary(ByteTokenizer(), 257)
    with pytest.raises(ValueError, match=r"257 tokens.* 256"):
        check_vocabulary(ByteTokenizer(), 256)
