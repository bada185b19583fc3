"""Pieces of text are whole, joined they are what decoding everything gives, and no part of a stop string is in them."""

import random

import pytest

from ringformer.data import load_tokenizer
from ringformer.inference.text.text_stream import StopStrings, TextStream, check_stops
from tests.data.chat_samples import llama2, llama3, sentencepiece

TEXTS = [
    " carries keys and values.",
    "carries",
    "  two",
    "\n\n- one\n",
    "naïve 日本語 🙂👩‍👩‍👧 é",
    "\u00a0x",
    "</s> <0x0A>",
    "a" * 40,
]
BEFORE = ["", "The ring", "A chat between ", "x\n", "日本", "  "]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    trained = {"sentencepiece": sentencepiece(folder), "llama2": llama2(folder / "2"), "llama3": llama3(folder / "3")}
    return {"bytes": load_tokenizer("bytes"), "prefixed": _prefixed(folder)} | {
        name: load_tokenizer(str(path)) for name, path in trained.items()
    }


def _prefixed(folder):
    """SentencePiece as LLaMA-2 has it: a space before a text, which decoding takes off again."""
    import sentencepiece as library

    path = folder / "prefixed.model"
    lines = iter(["the ring carries blocks of keys and values", "a chat between a user and an assistant"] * 20)
    with path.open("wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=file,
            vocab_size=310,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return load_tokenizer(str(path))


NAMES = ("bytes", "sentencepiece", "prefixed", "llama2", "llama3")


def pieces_of(tokenizer, before, ids):
    stream = TextStream(tokenizer, before)
    return [*(stream.push(i) for i in ids), stream.close()]


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_what_decoding_adds_to_the_prompt(tokenizers, name):
    tokenizer = tokenizers[name]
    for before in map(tokenizer.encode, BEFORE):
        for ids in map(tokenizer.encode, TEXTS):
            pieces = pieces_of(tokenizer, before, ids)
            assert tokenizer.decode(before) + "".join(pieces) == tokenizer.decode([*before, *ids])
            if len(ids) > 6:
                assert any(pieces[:-2]), "nothing came before the end"
            for piece in pieces:
                piece.encode()  # whole characters: no lone surrogate
                assert "\ufffd" not in piece


def test_a_space_stays_where_a_prompt_goes_on(tokenizers):
    """SentencePiece takes the space off where a text begins, which a continuation does not."""
    tokenizer = tokenizers["prefixed"]
    ids = tokenizer.encode("carries")
    assert tokenizer.decode(ids) == "carries"
    assert "".join(pieces_of(tokenizer, tokenizer.encode("the ring"), ids)) == " carries"
    assert "".join(pieces_of(tokenizer, [tokenizer.bos_id], ids)) == "carries"


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_may_end_in_a_long_run_of_byte_tokens(tokenizers, name):
    """Some tokenizers read such a run as a whole: what is decoded must not begin inside a character."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("ring 日本語日本語語")
    last = len(tokenizer.encode("ring 日本語日本語"))
    assert len(ids) - last in (1, 3)
    assert "".join(pieces_of(tokenizer, ids[:last], ids[last:])) == "語"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", (3, 40))
def test_what_a_model_makes_up_is_decoded_as_it_is_at_once(tokenizers, name, length):
    """Broken characters, byte tokens, control tokens and rows of the model that are no tokens, in any order."""
    tokenizer, draw = tokenizers[name], random.Random(length)
    multibyte = tokenizer.encode("日🙂é")
    for _ in range(150):
        pool = draw.choice([range(tokenizer.vocab_size), multibyte, [*multibyte, *tokenizer.encode("a b\n")]])
        ids = [draw.choice(pool) for _ in range(length)]
        before = tokenizer.encode("the ring")
        expected = tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))
        assert "".join(pieces_of(tokenizer, before, ids)) == expected
        beyond = [i for token in ids for i in (token, tokenizer.vocab_size + 5)]
        assert "".join(pieces_of(tokenizer, before, beyond)) == expected


def test_decoding_stays_short(tokenizers, monkeypatch):
    """Each token costs the decoding of a few, however long the text is, and also where it is nothing but spaces."""
    tokenizer = tokenizers["prefixed"]
    before = tokenizer.encode("the ring carries " * 50)
    for ids in (tokenizer.encode("keys and values " * 200), tokenizer.encode("\n" * 500), tokenizer.encode(" " * 500)):
        stream, decode, longest = TextStream(tokenizer, before), tokenizer.decode, 0

        def counted(ids, decode=decode):
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids)

        monkeypatch.setattr(tokenizer, "decode", counted)
        for token in ids:
            stream.push(token)
        monkeypatch.undo()
        assert 0 < longest < 20


def cut(text: str, stops) -> str:
    """The oracle: read character by character until a stop string is complete."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


def test_stop_strings_by_brute_force():
    draw = random.Random(0)
    for _ in range(3000):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))]
        pieces = ["".join(draw.choices("abc", k=draw.randint(0, 4))) for _ in range(6)]
        stream, given = StopStrings(stops), ""
        for piece in pieces:
            given += stream.push(piece)
            expected = cut("".join(pieces), stops)
            assert expected.startswith(given), "a part of a stop string came out"
        assert stream.met == (expected != "".join(pieces))
        assert given + stream.close() == expected


def test_text_comes_as_soon_as_no_stop_string_can_hold_it():
    stream = StopStrings(["\nUSER:"])
    assert [stream.push(p) for p in ("yes", "\n", "US", "A\n", "USER", ":", "more")] == [
        "yes",
        "",
        "",
        "\nUSA",
        "",
        "",
        "",
    ]
    assert stream.met and stream.close() == ""


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_that_cannot_be(tokenizers, name):
    tokenizer = tokenizers[name]
    check_stops(["\n", " end", "</s>", "日本", " "], tokenizer)
    with pytest.raises(ValueError, match="a stop string is empty"):
        check_stops(["a", ""], tokenizer)
    with pytest.raises(ValueError, match="can never occur"):
        check_stops(["\ud800"], tokenizer)


def test_characters_that_no_token_spells(tmp_path):
    """A vocabulary without byte tokens has no way to say a snowman."""
    import sentencepiece as library

    with (tmp_path / "small.model").open("wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(["the ring carries keys"] * 9),
            model_writer=file,
            vocab_size=30,
            model_type="bpe",
            minloglevel=2,
            hard_vocab_limit=False,
        )
    tokenizer = load_tokenizer(str(tmp_path / "small.model"))
    check_stops(["ring", " keys"], tokenizer)
    with pytest.raises(ValueError, match="the stop string '☃' can never occur"):
        check_stops(["ring", "☃"], tokenizer)
