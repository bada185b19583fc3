"""Calls of tools: read from OpenAI's files, rendered as transformers renders them, trained on as answers are."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pytest

from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.chats.cleaning import Cleaning
from ringformer.data.chats.conversations import Conversation, Message, read_chats
from ringformer.data.chats.sandboxed_template import ChatTemplate
from ringformer.data.chats.templates import load_template
from ringformer.data.chats.trained_answers import sequences_of
from ringformer.data.sources.malformed import Malformed
from ringformer.data.stores.options import StoreOptions
from tests.data.chat_samples import llama3

JINJA = """{{- bos_token }}{% if tools -%}
<|start_header_id|>tools<|end_header_id|>{{ tools | tojson }}<|eot_id|>{% endif -%}
{% for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>{{ "\n\n" }}
{%- if message.role == "assistant" %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}<|eot_id|>{% endgeneration %}
{%- else %}{{ message.content }}
{%- if message.tool_call_id %} for {{ message.tool_call_id }}{% endif %}<|eot_id|>{% endif -%}
{% endfor -%}
{% if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>{{ "\n\n" }}{% endif %}"""
UNMARKED = JINJA.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOOLS = [{"type": "function", "function": {"name": "hops", "parameters": {"type": "object"}}}]


def call(*rings, name="hops"):
    functions = [{"name": name, "arguments": json.dumps({"ring": ring, "é": "<|eot_id|>"})} for ring in rings]
    return [{"id": f"c{i}", "type": "function", "function": function} for i, function in enumerate(functions)]


RECORD = {
    "tools": TOOLS,
    "messages": [
        {"role": "developer", "content": "Use the tool."},
        {"role": "user", "content": "How many hops on 8 and 4?"},
        {"role": "assistant", "content": None, "tool_calls": call(8, 4)},
        {"role": "tool", "tool_call_id": "c0", "content": "7"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "Seven and three."},
        {"role": "user", "content": "And on 2?"},
        {"role": "assistant", "content": "I ask.", "tool_calls": call(2), "weight": 0},
        {"role": "tool", "tool_call_id": "c0", "content": "1"},
        {"role": "assistant", "content": "One."},
    ],
}


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"jsonl:{path}"


def conversations(source, skip=False):
    malformed = Malformed(skip)
    return list(Cleaning(read_chats(source, "messages", split="train", malformed=malformed), "duplicate"))


@pytest.fixture(scope="module", params=[JINJA, UNMARKED], ids=["marked", "prefixes"])
def folder(request, tmp_path_factory):
    return llama3(tmp_path_factory.mktemp("tokenizer"), request.param)


def test_text_and_mask_are_those_of_transformers(tmp_path, folder):
    """But for names of special tokens within calls, which stay text here."""
    transformers = pytest.importorskip("transformers")
    record = json.loads(json.dumps(RECORD).replace("<|eot_id|>", "end").replace("developer", "system"))
    (conversation,) = conversations(written(tmp_path / "a.jsonl", record))
    tokenizer = load_tokenizer(str(folder))
    ((ids, trained),) = tokenizer.encode_chats([load_template("tokenizer", tokenizer)(conversation.messages)])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    messages = record["messages"]
    for message in messages:
        message["content"] = message["content"] or ""
        for each in message.get("tool_calls", ()):  # as transformers asks for them
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    expected = theirs.apply_chat_template(
        messages, tools=TOOLS, chat_template=JINJA, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == expected["input_ids"]
    assert trained.astype(int).tolist() == expected["assistant_masks"]


def test_special_tokens_in_arguments_stay_text(tmp_path, folder):
    (conversation,) = conversations(written(tmp_path / "a.jsonl", RECORD))
    tokenizer = load_tokenizer(str(folder))
    ((ids, _),) = tokenizer.encode_chats([load_template("tokenizer", tokenizer)(conversation.messages)])
    assert (ids == tokenizer.controls["<|eot_id|>"]).sum() == len(RECORD["messages"]) + 1
    assert tokenizer.decode(ids).count("<|eot_id|>") == 3


def test_an_answer_of_weight_0_is_read_only(tmp_path, folder):
    options = StoreOptions(written(tmp_path / "a.jsonl", RECORD), held_out=0, format="messages", template="tokenizer")
    tokenizer = load_tokenizer(str(folder))
    store, _ = open_or_build(tmp_path / "s", options, tokenizer)
    ids, trained = store.tokens[:], store.mask[:].astype(bool)
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False)).reshape(-1, 2)
    answers = [tokenizer.decode(ids[a:b]) for a, b in edges]
    first = '<call>hops {"ring": 8, "é": "<|eot_id|>"}</call><call>hops {"ring": 4, "é": "<|eot_id|>"}</call>'
    assert answers == [first, "Seven and three.", "One."]
    assert "I ask." in tokenizer.decode(ids)
    assert store.meta["utf8_bytes"] == len("".join(answers).encode())


def test_long_conversations_are_not_split_between_a_call_and_its_result(tmp_path, folder):
    tokenizer = load_tokenizer(str(folder))
    turns = RECORD["messages"][1:6] * 6
    source = written(tmp_path / "a.jsonl", {"tools": TOOLS, "messages": turns})
    options = StoreOptions(source, held_out=0, format="messages", template="tokenizer", chat_length=400)
    store, _ = open_or_build(tmp_path / "s", options, tokenizer)
    parts = [tokenizer.decode(store.tokens[a:b]) for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]
    assert len(parts) > 2 and sum(part.count("Seven and three.") for part in parts) == 6
    for part in parts:
        assert part.startswith("tools[") and part.count("hops [") == 0
        assert part.count("How many hops") == part.count("Seven and three.") == part.count("7 for c0")


def test_templates_without_tools_refuse_them(tmp_path, folder):
    source = written(tmp_path / "a.jsonl", RECORD)
    options = StoreOptions(source, held_out=0, format="messages", template="llama3")
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: it calls tools, .* template llama3 .* use the template tokenizer"
    ):
        open_or_build(tmp_path / "s", options, load_tokenizer(str(folder)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tool_calls": None}, "the 'content' of turn 2 is NoneType, not text"),
        ({"tool_calls": [{"id": "c"}]}, "a call of turn 2 has no function with a name"),
        ({"tool_calls": call(1, name=3)}, "a call of turn 2 has no function with a name"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "the arguments of f in turn 2 are not JSON"),
        ({"tool_calls": 5}, "the 'tool_calls' of turn 2 are int, not a list"),
        ({"tool_calls": None, "function_call": {"name": "f"}}, "turn 2 has a function_call, OpenAI's old form"),
        ({"reasoning_content": ["hm"]}, "the 'reasoning_content' of turn 2 is list, not text"),
        ({"name": 3}, "the 'name' of turn 2 is int, not text"),
        ({"weight": 0.5}, "the 'weight' of turn 2 is 0.5; it must be 0 or 1"),
    ],
)
def test_malformed_calls_are_named(tmp_path, change, message):
    record = json.loads(json.dumps(RECORD))
    record["messages"][2] |= change
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: {message}"):
        conversations(written(tmp_path / "a.jsonl", record))


def test_turns_with_tools():
    """Results come after calls; a conversation ends with an answer."""

    def kept(letters):
        names = {"u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
        messages = tuple(
            Message(names[x], str(i), '{"tool_calls": [{}]}' if x == "c" else "") for i, x in enumerate(letters)
        )
        cleaned = list(Cleaning([Conversation(messages, "x")], ""))
        return letters[: len(cleaned[0].messages)] if cleaned else ""

    assert kept("ucta") == "ucta" and kept("ucttaua") == "ucttaua" and kept("uctct") == "uctc"
    assert kept("uta") == "" and kept("uatua") == "ua" and kept("ucua") == "ucua" and kept("uctua") == "uc"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_beside_an_answer_are_trained_on_or_refused(tmp_path, key):
    """None is lost: a template that does not read this key refuses the record."""
    template = UNMARKED.replace(
        "{{ message.content }}\n{%- for", f"<think>{{{{ message.{key} }}}}</think>{{{{ message.content }}}}\n{{%- for"
    )
    assert template != UNMARKED
    answer = {"role": "assistant", "content": "Seven.", key: "eight less one"}
    source = written(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "Hops?"}, answer]})
    options = StoreOptions(source, held_out=0, format="messages", template="tokenizer")
    tokenizer = load_tokenizer(str(llama3(tmp_path / "reads", template)))
    store, _ = open_or_build(tmp_path / "s", options, tokenizer)
    assert tokenizer.decode(store.tokens[:][store.mask[:].astype(bool)]) == "<think>eight less one</think>Seven."
    other = load_tokenizer(str(llama3(tmp_path / "other", UNMARKED)))
    with pytest.raises(ValueError, match=r"leaves out 'eight less one' of turn 1 \(assistant\)"):
        open_or_build(tmp_path / "t", options, other)
    with pytest.raises(ValueError, match=r"has thoughts beside an answer .*which the template llama3 has no words for"):
        open_or_build(tmp_path / "u", replace(options, template="llama3"), other)


@pytest.mark.parametrize(("role", "turn"), [("system", 0), ("user", 1), ("assistant", 2)])
def test_the_name_of_a_speaker_is_in_the_text_or_the_record_is_refused(tmp_path, role, turn):
    messages = [{"role": x, "content": f"by the {x}"} for x in ("system", "user", "assistant")]
    messages[turn]["name"] = "Ada"
    source = written(tmp_path / "a.jsonl", {"messages": messages})
    options = StoreOptions(source, held_out=0, format="messages", template="tokenizer")
    names = UNMARKED.replace("{{ message.content }}", "{{ message.name or '' }}: {{ message.content }}")
    tokenizer = load_tokenizer(str(llama3(tmp_path / "names", names)))
    store, _ = open_or_build(tmp_path / "s", options, tokenizer)
    assert tokenizer.decode(store.tokens[:]).count(f"Ada: by the {role}") == 1
    other = load_tokenizer(str(llama3(tmp_path / "other", UNMARKED)))
    with pytest.raises(ValueError, match=rf"leaves out 'Ada' of turn {turn} \({role}\)"):
        open_or_build(tmp_path / "t", options, other)
    with pytest.raises(ValueError, match="names a speaker, which the template llama3 has no words for"):
        open_or_build(tmp_path / "u", replace(options, template="llama3"), other)


def test_tables_add_no_arguments(tmp_path):
    """Arrow gives each object the keys of all objects; JSON text of arguments keeps its nulls."""
    record = json.loads(json.dumps(RECORD))
    first, second = (call["function"] for call in record["messages"][2]["tool_calls"])
    first["arguments"], second["arguments"] = {"ring": 8}, {"day": 3}
    record["messages"][7]["tool_calls"][0]["function"]["arguments"] = {"ring": 2, "day": 1}
    datasets.Dataset.from_list([record]).to_parquet(tmp_path / "a.parquet")
    del record["messages"][2]["content"]
    assert conversations(f"parquet:{tmp_path}/a.parquet") == [
        conversation._replace(name=f"{tmp_path}/a.parquet:0")
        for conversation in conversations(written(tmp_path / "a.jsonl", record))
    ]


def test_the_sandbox_makes_no_token_of_a_name_in_arguments():
    """In this process: the worker's process is isolated, so that mutations of the package do not reach it."""
    names = ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"]
    template = ChatTemplate(JINJA, {"bos_token": names[-1]}, names, None, 10**6)
    extra = json.dumps({"tool_calls": call("zigzag")})
    conversation = [["user", "how many hops?", "", True], ["assistant", "", extra, True]]
    (sequence,) = sequences_of(template, conversation)
    controls = [text for text, _, is_control in sequence["parts"] if is_control]
    assert controls.count("<|eot_id|>") == 2, "one for each turn"
