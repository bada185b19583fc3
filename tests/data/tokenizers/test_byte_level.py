"""Bytes as tokens."""

import pytest

from ringformer.data import ByteTokenizer, load_tokenizer


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
