"""Answers are trained on as the model has to write them, however a template writes them later; nothing of a
conversation is left out in silence."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.chats.sandboxed_template import ChatTemplate, Refused
from ringformer.data.chats.templates import parse_template_option
from ringformer.data.chats.trained_answers import sequences_of
from ringformer.data.stores import prepare
from ringformer.data.stores.options import StoreOptions
from ringformer.runs.config_file import load_config
from tests.commit import ROOT
from tests.data.chat_samples import llama3

CONTROLS = ["<s>", "<|end|>", "<|stop|>", "<|more|>"]
TURN = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
FORGETS = """{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
<s>{{ m.role }}
{% if '</think>' in m.content and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip() }}
{%- else %}{{ m.content }}{% endif %}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<s>assistant
{% if thinks is defined and not thinks %}<think>

</think>

{% endif %}{% endif %}"""
"""Leaves out the thoughts of answers before the last question."""
OPENS = FORGETS.replace(" and loop.index0 < ns.last", "").replace("<s>assistant\n{%", "<s>assistant\n<think>\n{%")
"""Begins a thought in the prompt, and leaves out all thoughts."""
THOUGHTS = [
    ["user", "Why?", ""],
    ["assistant", "<think>\nhm\n</think>\n\nSo.", ""],
    ["user", "And?", ""],
    ["assistant", "<think>\noh\n</think>\n\nYes.", ""],
]
PLAIN = [["user", "a", ""], ["assistant", "b", ""], ["user", "c", ""], ["assistant", "d", ""]]


def found(template, conversation, **options):
    """Return the text of each sequence, with brackets around what is trained on."""
    compiled = ChatTemplate(template, {}, CONTROLS, None, 10**6, options)
    texts = []
    for sequence in sequences_of(compiled, [[*message, True][:4] for message in conversation]):
        text, was_trained = "", False
        for part, trained, _ in sequence["parts"]:
            text += "[" * (trained and not was_trained) + "]" * (was_trained and not trained) + part
            was_trained = trained
        texts.append((text + "]" * was_trained, sequence["answers"]))
    return texts


def test_answers_that_stay_are_in_one_sequence():
    text = "<s>user\na<|end|>\n<s>assistant\n[b<|end|>]\n<s>user\nc<|end|>\n<s>assistant\n[d<|end|>]\n"
    assert found(TURN + PROMPT, PLAIN) == [(text, [0, 1])]


def test_an_answer_that_is_rewritten_ends_a_sequence_of_its_own():
    first = "<s>user\nWhy?<|end|>\n<s>assistant\n[<think>\nhm\n</think>\n\nSo.<|end|>]"
    whole = (
        "<s>user\nWhy?<|end|>\n<s>assistant\nSo.<|end|>\n"
        "<s>user\nAnd?<|end|>\n<s>assistant\n[<think>\noh\n</think>\n\nYes.<|end|>]\n"
    )
    assert found(FORGETS, THOUGHTS) == [(first, [0]), (whole, [1])]


def test_an_answer_that_is_read_only_has_no_sequence_of_its_own():
    conversation = [message[:] for message in THOUGHTS]
    conversation[1] += [False]
    ((text, answers),) = found(FORGETS, conversation)
    assert answers == [1] and text.count("[") == 1


def test_a_conversation_that_is_only_read_has_one_sequence():
    conversation = [[*message, False] for message in THOUGHTS]
    (_, answers), *others = found(OPENS, conversation)
    assert answers == [1] and not others


def test_an_answer_continues_a_thought_that_its_prompt_begins():
    """The rendering leaves it out, so that the prompt is not its beginning."""
    sequences = found(OPENS, THOUGHTS)
    assert [answers for _, answers in sequences] == [[0], [1]]
    assert sequences[0][0] == "<s>user\nWhy?<|end|>\n<s>assistant\n<think>\n[hm\n</think>\n\nSo.<|end|>]"
    with pytest.raises(Refused, match=r"ends the prompt of answer 0 with '<s>assistant\\n<think>\\n', which that answ"):
        found(OPENS, PLAIN)


def test_a_system_message_that_only_prompts_have_is_trained_with():
    """As in Mistral-Nemo: it stands in the last question, if that is the last message."""
    template = (
        """{% for m in messages %}{% if m.role != 'system' %}<s>{{ m.role }}
{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif -%}
{{ m.content }}<|end|>
{% endif %}{% endfor %}"""
        + PROMPT
    )
    first, second = found(template, [["system", "Be brief.", ""], *PLAIN])
    assert first == ("<s>user\nBe brief. a<|end|>\n<s>assistant\n[b<|end|>]", [0])
    text = "<s>user\na<|end|>\n<s>assistant\nb<|end|>\n<s>user\nBe brief. c<|end|>\n<s>assistant\n[d<|end|>]"
    assert second == (text, [1])


def test_an_option_of_the_template_is_used_and_has_to_exist():
    ((text, _),) = found(FORGETS, PLAIN[:2], thinks=False)
    assert text == "<s>user\na<|end|>\n<s>assistant\n<think>\n\n</think>\n\n[b<|end|>]"
    with pytest.raises(Refused, match=r"does not read template_option enable_thinking; .* are thinks$"):
        found(FORGETS, PLAIN, enable_thinking=False)


@pytest.mark.parametrize(
    ("closing", "answer"),
    [
        ("{% if not add_generation_prompt %}<|stop|>{% endif %}", "[b<|end|>]\n<|stop|>"),  # Phi-3
        ("", "[b<|end|>]\n"),
    ],
    ids=["a token behind everything", "nothing"],
)
def test_the_end_is_that_of_the_turn(closing, answer):
    ((text, _),) = found(TURN + PROMPT + closing, PLAIN[:2])
    assert text == f"<s>user\na<|end|>\n<s>assistant\n{answer}"


def test_several_tokens_that_end_a_turn_are_all_trained():
    """Command R writes one token behind the answer and another behind the turn."""
    template = TURN.replace("<|end|>", "<|more|><|end|>") + PROMPT
    ((text, _),) = found(template, PLAIN[:2])
    assert text.endswith("[b<|more|><|end|>]\n")


def test_another_last_token_is_trained_where_it_is_the_end():
    """As in gpt-oss: the last answer ends with another token than earlier ones."""
    template = (
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|stop|>{% else %}<|end|>{% endif %}{% endfor %}" + PROMPT
    )
    first, second = found(template, PLAIN)
    assert first == ("<s>user\na<|end|><s>assistant\n[b<|stop|>]", [0])
    assert second[0].endswith("<s>assistant\nb<|end|><s>user\nc<|end|><s>assistant\n[d<|stop|>]")


CALLS = {"tool_calls": [{"type": "function", "function": {"name": "count", "arguments": {"text": 'a "ring"', "n": 7}}}]}
COUNT = {"name": "count", "parameters": {"properties": {"text": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": COUNT}]
WRITES = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>
{% endfor %}"""
USES_TOOLS = [
    ["tools", json.dumps(TOOLS), ""],
    ["user", "How many?", ""],
    ["assistant", "", json.dumps(CALLS)],
    ["tool", '{"words": 2}', ""],
    ["assistant", "Two.", ""],
]
LOSSES = {
    "the tools": ("{% if tools %}{{ tools | tojson }}{% endif %}", "", "'count' of the tools"),
    "a call": ("{{ call.function | tojson }}", "", r"'count' of turn 1 \(assistant\)"),
    "a call's arguments": ("call.function |", "call.function.name |", r"'text' of turn 1 \(assistant\)"),
    "a question": ("{{ m.content }}", "{{ m.content if m.role != 'user' }}", r"'How many\?' of turn 0 \(user\)"),
    "a result": ("{{ m.content }}", "{{ m.content if m.role != 'tool' }}", r"'{\"words\": 2}' of turn 2 \(tool\)"),
    "an answer": ("{{ m.content }}", "{{ m.content | replace('Two', '2') }}", r"'Two\.' of turn 3 \(assistant\)"),
}


@pytest.mark.parametrize(("old", "new", "error"), LOSSES.values(), ids=LOSSES)
def test_what_a_template_leaves_out_is_named(old, new, error):
    assert len(found(WRITES + PROMPT, USES_TOOLS)) == 1
    assert old in WRITES
    with pytest.raises(Refused, match=f"leaves out (?:{error}): remove it from the record, or choose a template"):
        found(WRITES.replace(old, new) + PROMPT, USES_TOOLS)


def test_a_turn_is_not_found_in_an_earlier_one():
    """Its text stands there, but of another turn."""
    conversation = [["user", "Go.", ""], ["assistant", "b", ""], ["user", "Go.", ""], ["assistant", "d", ""]]
    template = TURN.replace("{{ m.content }}", "{% if m.role != 'user' or loop.first %}{{ m.content }}{% endif %}")
    with pytest.raises(Refused, match=r"leaves out 'Go\.' of turn 2 \(user\)"):
        found(template + PROMPT, conversation)


def test_switches_in_a_message_are_read_and_not_written():
    """Qwen3 and SmolLM3 read /no_think."""
    template = TURN.replace("{{ m.content }}", "{{ m.content | replace('/no_think', '') }}") + PROMPT
    assert len(found(template, [["user", "a /no_think", ""], ["assistant", "b", ""]])) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("enable_thinking=false, effort=high,n=2", {"enable_thinking": False, "effort": "high", "n": 2}),
        ("enable_thinking=False,a=True,b=None,c=none", {"enable_thinking": False, "a": True, "b": None, "c": "none"}),
        ("thinking", "'thinking' is not like enable_thinking=false"),
        ("a=1,a=2", "a is set twice"),
        ("messages=[]", "messages is set twice, or by the conversation"),
        ("bos_token=x", "bos_token is set twice, or by the conversation"),
    ],
)
def test_options_of_templates(text, expected):
    if isinstance(expected, dict):
        assert parse_template_option(text) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            parse_template_option(text)


def records(path, *conversations):
    lines = []
    for conversation in conversations:
        messages = [{"role": role, "content": content} for role, content, *_ in conversation]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return f"jsonl:{path}"


@pytest.fixture
def folder(tmp_path):
    """LLaMA-3's tokenizer, with a template that forgets thoughts."""
    template = FORGETS.replace("<s>", "<|start_header_id|>").replace("<|end|>", "<|eot_id|>")
    return llama3(tmp_path / "tokenizer", template)


def store_of(tmp_path, folder, name="store", **options):
    source = records(tmp_path / "a.jsonl", THOUGHTS * 3)
    settings = {"held_out": 0, "format": "messages", "template": "tokenizer", "tokenizer": str(folder), **options}
    asked = StoreOptions(source, **settings)
    store, _ = open_or_build(tmp_path / name, asked, load_tokenizer(str(folder)))
    report = json.loads((tmp_path / name / "report.json").read_text())
    texts = [
        load_tokenizer(str(folder)).decode(store.tokens[a:b][store.mask[a:b].astype(bool)])
        for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)
    ]
    return texts, report["left_out"], store


def test_a_store_has_a_sequence_for_each_rewritten_answer(tmp_path, folder, capsys):
    texts, left_out, store = store_of(tmp_path, folder)
    assert texts == ["<think>\nhm\n</think>\n\nSo.", "<think>\noh\n</think>\n\nYes."] * 3
    lengths = np.diff(store.offsets)
    assert left_out == {"tokens added by sequences of answers that later turns rewrite": lengths[:-1].sum()}
    assert "times the text; to train on the last answers alone: --rewritten=last" in capsys.readouterr().err
    texts, left_out, _ = store_of(tmp_path, folder, "last", rewritten="last")
    assert texts == ["<think>\noh\n</think>\n\nYes."]
    assert left_out == {"answers dropped: later turns rewrite them": 5}
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template writes answer 0 in another way"):
        store_of(tmp_path, folder, "refuse", rewritten="refuse")


@pytest.mark.parametrize("rewritten", ["split", "last"])
def test_long_conversations_that_are_rewritten_are_split_between_turns(tmp_path, folder, rewritten):
    """No answer is cut, and with `split` none is lost."""
    whole = max(np.diff(store_of(tmp_path, folder)[2].offsets))
    texts, left_out, store = store_of(tmp_path, folder, "short", rewritten=rewritten, chat_length=int(whole * 0.6))
    assert max(np.diff(store.offsets)) <= whole * 0.6
    assert left_out["splits between turns"] > 0 and "answers cut at chat_length" not in left_out
    answers = ["<think>\nhm\n</think>\n\nSo.", "<think>\noh\n</think>\n\nYes."]
    assert texts == answers * 3 if rewritten == "split" else set(texts) <= set(answers) and len(texts) > 1


def test_a_store_without_the_setting_refused_rewritten_answers(tmp_path, folder, monkeypatch):
    """Stores of earlier versions: the same option opens them, and a run that names one takes it."""
    source = records(tmp_path / "a.jsonl", PLAIN)
    options = StoreOptions(
        source, held_out=0, format="messages", template="tokenizer", tokenizer=str(folder), rewritten="refuse"
    )
    tokenizer = load_tokenizer(str(folder))
    monkeypatch.setattr(prepare, "_settings", lambda *args: without(prepare_settings(*args), ADDED))
    open_or_build(tmp_path / "store", options, tokenizer)
    monkeypatch.undo()
    open_or_build(tmp_path / "store", options, tokenizer)
    with pytest.raises(ValueError, match="built with other options: rewritten is 'refuse', not 'split'"):
        open_or_build(tmp_path / "store", replace(options, rewritten="split"), tokenizer)
    config = load_config(f"{ROOT}/configs/quickstart.py", [f"--config.data.store={tmp_path / 'store'}"])
    assert (config.data.template, config.data.rewritten) == ("tokenizer", "refuse")


ADDED = ("rewritten", "template_option")
prepare_settings = prepare._settings


def without(settings, keys):
    return {key: value for key, value in settings.items() if key not in keys}
