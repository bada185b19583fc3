"""What is trained on is each answer and its end token, by every template, with real tokenizers."""

import numpy as np
import pytest

from ringformer.data import load_tokenizer
from ringformer.data.chats.templates import load_template, template_id
from tests.data.chat_samples import CHATS, LLAMA3_JINJA, UNMARKED_JINJA, chat, llama3, sentencepiece


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "bytes": load_tokenizer("bytes"),
        "sentencepiece": load_tokenizer(str(sentencepiece(tmp_path_factory.mktemp("sp")))),
        "llama3": load_tokenizer(str(llama3(tmp_path_factory.mktemp("l3")))),
    }


CASES = [
    ("vicuna", "bytes"),
    ("vicuna", "sentencepiece"),
    ("vicuna", "llama3"),
    ("llama2", "sentencepiece"),
    ("llama3", "llama3"),
    ("tokenizer", "llama3"),
]


def spans(trained):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(int), [0]])))
    return list(zip(edges[::2], edges[1::2], strict=True))


def encode(tokenizers, template, name, messages):
    tokenizer = tokenizers[name]
    ((ids, trained),) = tokenizer.encode_chats([load_template(template, tokenizer)(messages)])
    assert ids.shape == trained.shape and trained.dtype == bool
    return tokenizer, ids, trained


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize(("template", "name"), CASES)
def test_answers_and_their_end_tokens_are_trained(tokenizers, template, name, messages):
    """Each span ends on the end token and decodes to the answer; all other text is masked and complete."""
    tokenizer, ids, trained = encode(tokenizers, template, name, messages)
    answers = [message.content for message in messages if message.role == "assistant"]
    found = spans(trained)
    assert len(found) == len(answers)
    for (start, end), answer in zip(found, answers, strict=True):
        assert ids[end - 1] == tokenizer.eos_id
        assert not set(ids[start : end - 1]) & set(tokenizer.controls.values())
        text = tokenizer.decode(ids[start : end - 1])
        expected = answer + " " if template == "llama2" else answer
        # A token may begin before the answer: it has its first character. None may be missing, or be whole before it.
        assert text.endswith(expected)
        assert not text[: len(text) - len(expected)].strip()
        if answer:
            assert not tokenizer.decode(ids[start + 1 : end - 1]).endswith(expected)
        else:
            assert text == expected
    ends = tokenizer.eos_id if template in ("vicuna", "llama2") else tokenizer.controls["<|eot_id|>"]
    questions = sum(message.role != "assistant" for message in messages)
    assert (ids == ends).sum() == len(answers) + (questions if template in ("llama3", "tokenizer") else 0)
    if tokenizer.bos_id is not None:
        assert ids[0] == tokenizer.bos_id and not trained[0]


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize(("template", "name"), CASES)
def test_any_cut_keeps_the_mask(tokenizers, template, name, messages):
    """A store cuts ids and mask alike: a cut answer is trained on up to the cut, and no end token with it."""
    tokenizer, ids, trained = encode(tokenizers, template, name, messages)
    for cut in range(1, len(ids)):
        whole = [end for _, end in spans(trained) if end <= cut]
        assert (ids[:cut][trained[:cut]] == tokenizer.eos_id).sum() == len(whole)


def test_the_formats_are_the_published_ones(tokenizers):
    messages = chat("q", "a", "r", "b", system="s")

    def text(template, name):
        segments = load_template(template, tokenizers[name])(messages)
        return "".join(segment.text for segment in segments)

    assert text("vicuna", "sentencepiece") == "<s>s USER: q ASSISTANT: a</s>USER: r ASSISTANT: b</s>"
    assert text("llama2", "sentencepiece") == (
        "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nq [/INST] a </s><s>[INST] r [/INST] b </s>"
    )
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>".format
    expected = "<|begin_of_text|>" + "".join(head(m.role, m.content) for m in messages)
    assert text("llama3", "llama3") == text("tokenizer", "llama3") == expected
    default = load_template("vicuna", tokenizers["bytes"])(messages[1:])
    assert default[0].text.startswith("A chat between a curious user and an artificial intelligence assistant. The")


SAFE = {name: messages for name, messages in CHATS.items() if name != "role-like"}
"""transformers takes special tokens in a message for the tokens themselves, so the others are compared."""


@pytest.mark.parametrize("messages", SAFE.values(), ids=SAFE)
def test_ids_and_masks_equal_those_of_transformers(tokenizers, messages, tmp_path):
    transformers = pytest.importorskip("transformers")
    # With trimmed offsets, as in LLaMA-3's own file, theirs masks the spaces at an answer's borders; ours does not.
    folder = llama3(tmp_path / "t", trim_offsets=False)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(
        [message._asdict() for message in messages], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in ("tokenizer", "llama3"):
        _, ids, trained = encode(tokenizers, template, "llama3", messages)
        assert ids.tolist() == expected["input_ids"]
        assert trained.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_a_template_without_marks_is_understood_by_prefixes(tokenizers, messages, tmp_path):
    marked, unmarked = tokenizers["llama3"], load_tokenizer(str(llama3(tmp_path / "t", UNMARKED_JINJA)))
    (a,) = marked.encode_chats([load_template("tokenizer", marked)(messages)])
    (b,) = unmarked.encode_chats([load_template("tokenizer", unmarked)(messages)])
    assert np.array_equal(a, b)
    assert template_id("tokenizer", marked) != template_id("tokenizer", unmarked)


OUTSIDE = LLAMA3_JINJA.replace(
    "{{ message['content'] + '<|eot_id|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}<|eot_id|>\n",
)


def test_an_end_token_outside_the_marks_is_trained_all_the_same(tokenizers, tmp_path):
    tokenizer = load_tokenizer(str(llama3(tmp_path / "t", OUTSIDE)))
    ((ids, trained),) = tokenizer.encode_chats([load_template("tokenizer", tokenizer)(CHATS["many turns"])])
    assert [int(ids[end - 1]) for _, end in spans(trained)] == [tokenizer.eos_id] * 3


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ends answer 0 with no control token"),
        ("{% for m in messages %}{{ m.content | upper }}<|eot_id|>{% endfor %}", r"leaves out 'q' of turn 0 \(user\)"),
        ("{% for m in messages[-2:] %}{{ m.content }}<|eot_id|>{% endfor %}", r"leaves out 'q' of turn 0 \(user\)"),
        ("{% generation %}{{ messages[1].content }}<|eot_id|>{% endgeneration %}", "none around answer 1"),
        ("{{ raise_exception('never') }}", "refuses this: never"),
        ("{{ messages.append(1) }}", "refuses this"),
    ],
)
def test_templates_whose_answers_cannot_be_found_are_refused(tmp_path, template, message):
    tokenizer = load_tokenizer(str(llama3(tmp_path / "t", template)))
    with pytest.raises(ValueError, match=message):
        load_template("tokenizer", tokenizer)(chat("q", "a", "r", "b"))


def test_templates_that_cannot_be(tokenizers, tmp_path):
    with pytest.raises(ValueError, match="unknown chat template 'chatml'; known: vicuna, llama2, llama3, tokenizer"):
        load_template("chatml", tokenizers["bytes"])
    with pytest.raises(ValueError, match=r"llama3 needs <\|begin_of_text\|>, .* sentencepiece-"):
        load_template("llama3", tokenizers["sentencepiece"])
    with pytest.raises(ValueError, match="has no chat template"):
        load_template("tokenizer", tokenizers["bytes"])
    with pytest.raises(ValueError, match="cannot be used"):
        load_template("tokenizer", load_tokenizer(str(llama3(tmp_path / "t", "{% for %}"))))
