"""Texts are continued, answered and stopped; the model is a fake that says what it is told to."""

import json
from copy import copy

import pytest

from ringformer.data.chats.conversations import Message
from ringformer.files.resumed_lines import resumed_lines
from ringformer.inference.sampling import Sampling
from ringformer.inference.text.prompt_rows import PromptRows, read_prompts
from ringformer.inference.text.run_text import RunText
from ringformer.inference.text.text_generator import TextGenerator
from tests.data.chat_samples import llama3, sentencepiece
from tests.inference.fake_generator import FakeGenerator
from tests.inference.runs import converted_folder, llama2, run_folder

KINDS = ("bytes", "sp", "llama2", "llama3")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """RunTexts of chat runs."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizers = {
        "bytes": "bytes",
        "sp": sentencepiece(folder),
        "llama2": llama2(folder / "2"),
        "llama3": llama3(folder / "3"),
    }
    return {
        kind: RunText(run_folder(folder / f"run-{kind}", str(spec), format="messages", template="vicuna"))
        for kind, spec in tokenizers.items()
    }


def said(text, answer, *, end=True):
    """The tokens with which a model would go on, and an end token."""
    before = text.tokenizer.encode("x")
    ids = text.tokenizer.encode(f"x{answer}")
    assert ids[: len(before)] == before
    return ids[len(before) :] + [text.tokenizer.eos_id] * end


def model(text, *answers, max_length=4096):
    return TextGenerator(FakeGenerator(answers, max_length), text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_ends_row_by_row(texts, kind):
    text = texts[kind]
    answers = [said(text, " carries keys"), said(text, " 日本 STOP and more"), said(text, " of a long text", end=False)]
    generator = model(text, answers)
    longest = len(answers[2])
    found = generator.complete(["The ring", "a", "the end"], max_new_tokens=longest, stop=["STOP", "never"])
    short = text.tokenizer.decode([*text.tokenizer.encode("The ring"), *answers[0][:longest]]).removeprefix("The ring")
    assert found == [short, cut_at(text, answers[1][:longest]), " of a long text"]
    (session,) = generator.generator.sessions
    assert session.appended == [[text.encode(p) for p in ("The ring", "a", "the end")]]


def cut_at(text, ids):
    return text.tokenizer.decode([*text.tokenizer.encode("a"), *ids])[1:].partition("STOP")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_over_several_tokens(texts, kind):
    """No part of it comes out, nothing behind it is computed, and a false beginning of one is text."""
    text = texts[kind]
    ids = text.tokenizer.encode("xthe USA, no\nUSER: hello" + "y" * 50)[len(text.tokenizer.encode("x")) :]
    generator = model(text, [ids])
    answer = generator.stream("x", max_new_tokens=len(ids), stop=["\nUSER:"])
    pieces = list(answer)
    assert "".join(pieces) == "the USA, no" == answer.text and all(pieces)
    assert len(answer.ids) < len(ids) - 5
    assert "USER:" in text.tokenizer.decode(answer.ids) and "hello" not in text.tokenizer.decode(answer.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_what_a_batch_says(texts, kind):
    text = texts[kind]
    ids = said(text, " naïve 日本語 🙂 end")
    for chat in (False, True):
        answer = model(text, [ids]).stream("a", max_new_tokens=99, chat=chat)
        (whole,) = model(text, [ids]).complete(["a"], max_new_tokens=99, chat=chat)
        assert "".join(answer) == whole == answer.text and answer.ids == ids
        assert whole == ("naïve 日本語 🙂 end" if chat and kind != "bytes" else " naïve 日本語 🙂 end")


@pytest.mark.parametrize("way", ["complete", "stream"])
def test_a_chat_has_its_template_and_ends_with_the_turn(way, tmp_path):
    """A turn's end token is none of the texts' own."""
    folder = llama3(tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = RunText(converted_folder(tmp_path / "model", folder))
    (turn_end,) = text.chat_end_tokens - text.end_tokens
    generator = model(text, [[*said(text, " yes", end=False), turn_end, *said(text, " and more")]])
    if way == "complete":
        (answer,) = generator.complete(["why?"], max_new_tokens=9, chat=True)
    else:
        answer = "".join(generator.stream("why?", max_new_tokens=9, chat=True))
    assert answer.strip() == "yes"
    assert generator.generator.sessions[0].appended == [[text.encode_chat([Message("user", "why?")]).ids]]


def test_what_was_cut_in_a_character_is_shown_at_the_end(texts):
    ids = texts["sp"].tokenizer.encode("日")
    assert model(texts["sp"], [ids]).complete(["a"], max_new_tokens=len(ids) - 1) == ["\ufffd" * 2]
    assert list(model(texts["sp"], [ids]).stream("a", max_new_tokens=len(ids))) == ["日"]


def test_sampling_and_end_tokens_are_passed_on(texts):
    generator = model(texts["llama3"], [said(texts["llama3"], "a")], [said(texts["llama3"], "a")])
    generator.complete(["x"], max_new_tokens=2, sampling=Sampling(0.5, top_k=3, seed=7))
    generator.complete(["x"], max_new_tokens=2)
    assert generator.generator.samplings == [Sampling(0.5, 3, None, 7), Sampling()]
    assert generator.complete([], max_new_tokens=2) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["a", ""], {}, "the prompt is empty"),
        (["a"], {"stop": [""]}, "a stop string is empty"),
        (["a"], {"stop": ["\ud800"]}, "can never occur"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        (
            ["a", "b" * 90],
            {},
            r"a prompt of 90 tokens and 11 new ones .* limit of 100 tokens: at most 10 new tokens fit",
        ),
        (["b" * 90], {}, "new ones leave room for a prompt of at most 89"),
        (["b" * 100], {}, "the prompt alone fills it"),
    ],
)
def test_what_cannot_be_is_refused_before_any_compute(texts, prompts, options, message):
    generator = model(texts["bytes"], max_length=100)
    for ask in (generator.complete, lambda prompts, **options: generator.stream(prompts[-1], **options)):
        with pytest.raises(ValueError, match=message):
            ask(prompts, **{"max_new_tokens": 11} | options)
    assert not generator.generator.sessions
    model(texts["bytes"], [[97] * 10], max_length=100).complete(["b" * 90], max_new_tokens=10)


def test_rows_that_no_prompt_needs_say_nothing(texts):
    """Of a mesh with dp=4, whose rows come in fours."""
    text = texts["sp"]
    generator = FakeGenerator([[said(text, " one"), said(text, " two"), [5] * 9, [5] * 9]], dp=4)
    assert TextGenerator(generator, text).complete(["a", "b"], max_new_tokens=9) == [" one", " two"]
    assert generator.sessions[0].lengths[2:] == [len(text.encode("a"))] * 2


def test_an_end_token_may_be_any_token(texts):
    """A generation_config.json may name one that is text elsewhere; it ends the answer and is not in it."""
    text = copy(texts["bytes"])
    text.end_tokens = frozenset([ord(";")])
    generator = TextGenerator(FakeGenerator([[list(b"yes;no")]] * 2), text)
    assert generator.complete(["a"], max_new_tokens=6) == ["yes"]
    assert "".join(generator.stream("a", max_new_tokens=6)) == "yes"


def test_a_complete_text_is_valid_unicode(texts, tmp_path):
    """Bytes that are no character become U+FFFD, as other tokenizers write them, in lists and in files of answers."""
    text, ids = texts["bytes"], [*b"q\xc8 \xe6\x97\xa5\xff"]
    expected = "q\ufffd 日\ufffd"
    assert model(text, [ids]).complete(["a"], max_new_tokens=len(ids)) == [expected]
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with resumed_lines(tmp_path / "out.jsonl", "a test", {}) as out:
        prompts = tmp_path / "in.jsonl"
        rows = PromptRows(prompts, read_prompts(prompts), out, text, chat=False, max_new_tokens=len(ids), limit=100)
        rows.answer(model(text, [ids]), 1, len(ids), Sampling(), [])
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"prompt": "a", "text": expected}


def test_blank_lines_of_a_file_are_no_prompts(texts, tmp_path):
    """The lines of others keep their numbers, and a file that was answered in part is gone on with."""
    text, ids = texts["bytes"], [*b"yes"]
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('\n{"prompt": "a"}\n \n{"prompt": 3}\r\n\r\n{"prompt": "b"}\n\n')
    answered = []
    for _ in range(2):
        with resumed_lines(out, "a test", {}) as lines:
            rows = PromptRows(prompts, read_prompts(prompts), lines, text, chat=False, max_new_tokens=3, limit=100)
            rows.answer(model(text, [ids], [ids]), 1, 3, Sampling(), [])
        answered.append(out.read_text())
    assert answered[0] == answered[1]
    first, second, third = map(json.loads, answered[0].splitlines())
    assert (first["text"], third["text"]) == ("yes", "yes") and "error" in second
    out.write_text('{"prompt": "a", "text": "yes"}\n{"prompt": "other", "text": "c"}\n')
    refused = pytest.raises(ValueError, match=r"out\.jsonl:2 does not answer .*in\.jsonl:4: choose another --out")
    with refused, resumed_lines(out, "a test", {}) as lines:
        PromptRows(prompts, read_prompts(prompts), lines, text, chat=False, max_new_tokens=3, limit=100)
