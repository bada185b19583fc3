"""What is trained on, by the bytes of tokens and by the libraries' offsets."""

import json

import numpy as np
import pytest

from ringformer.data import Segment, load_tokenizer
from ringformer.data.tokenizers.token_bytes import TokenBytes, byte_level_bytes, metaspace_bytes, trained_tokens
from tests.data.chat_samples import llama2, llama3, sentencepiece

TRICKY = ("naïve 日本語 🙂 ring", "  two  spaces\n\n", "a ▁ b", "a ring of keys", " <0x0A>")


@pytest.mark.parametrize("kind", [sentencepiece, llama2, llama3])
def test_masks_by_bytes_equal_those_by_the_library_s_offsets(tmp_path, kind, monkeypatch):
    """Text cut everywhere: byte tokens, a literal U+2581, dummy prefixes. A whole chat and every stretch of it."""
    tokenizer = load_tokenizer(str(kind(tmp_path)))
    end = Segment("", trained=True, control=tokenizer.eos_id)
    chats = [
        [end, Segment(text[:cut]), Segment(text[cut:], trained=True), end, Segment("a ring"), end]
        for text in TRICKY
        for cut in range(len(text) + 1)
    ]
    asked = []
    trained = TokenBytes.trained
    monkeypatch.setattr(
        TokenBytes,
        "trained",
        lambda self, chat, ids, ask: trained(self, chat, ids, lambda chat: (asked.append(chat), ask(chat))[1]),
    )
    by_bytes = tokenizer.encode_chats(chats)
    assert len(asked) <= 0.3 * len(chats)  # a literal U+2581 has no bytes of its own
    monkeypatch.setattr(TokenBytes, "trained", lambda self, chat, ids, ask: ask(chat))
    for quick, library, pieces in zip(by_bytes, tokenizer.encode_chats(chats), chats, strict=True):
        assert np.array_equal(quick[0], library[0])
        assert np.array_equal(quick[1], library[1]), pieces


def test_masks_of_a_tokenizer_that_rewrites_the_text(tmp_path):
    """Its tokens are of another text; the library's offsets say what stood where."""
    folder = llama3(tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(str(folder))
    ((ids, trained),) = tokenizer.encode_chats([[Segment("What "), Segment("A Ring", trained=True)]])
    assert tokenizer.decode(ids[trained]).strip() == "a ring"


def test_a_token_that_overlaps_a_trained_piece_is_trained_on():
    starts, ends = np.array([0, 2, 2, 2, 6]), np.array([2, 2, 2, 6, 7])  # two tokens are said to be empty
    for pieces, expected in (
        ([(b"ab", False), (b"cdefg", True)], [0, 1, 1, 1, 1]),
        ([(b"abc", False), (b"d", True), (b"", True), (b"efg", False)], [0, 1, 1, 1, 0]),
        ([(b"a", True), (b"bcdef", False), (b"g", True)], [1, 0, 0, 0, 1]),
    ):
        assert trained_tokens(starts, ends, pieces).tolist() == [bool(x) for x in expected]


def test_both_notations_of_pieces():
    assert metaspace_bytes("\u2581a", is_byte=False) == b" a" and metaspace_bytes("<0x0A>", is_byte=True) == b"\n"
    assert byte_level_bytes("\u0120a\u010a") == b" a\n" and byte_level_bytes("\u2581") is None
