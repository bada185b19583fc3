"""Chats in the shapes that people have them in; a record of another shape says which format would read it."""

import json

import datasets
import pytest

from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.chats.conversations import Message, read_chats
from ringformer.data.sources.malformed import Malformed
from ringformer.data.stores.options import StoreOptions

PAIR = (Message("user", "q é"), Message("assistant", "a"))
WITH_SYSTEM = (Message("system", "s"), *PAIR)
EARLIER = (Message("user", "p"), Message("assistant", "b", trained=False), *PAIR)


def part(text, kind="text", **more):
    return {"type": kind, "text": text, **more}


def turns(*contents, roles=("user", "assistant"), role="role", text="content"):
    return [{role: roles[i % 2], text: content} for i, content in enumerate(contents)]


PARTS = turns([part("q "), part("é")], [part("a")])
SHAPES = {
    "parts": ("messages", {"messages": PARTS}, PAIR),
    "parts of the newer interface": (
        "messages",
        {"messages": turns([part("q é", "input_text")], [part("a", "output_text")])},
        PAIR,
    ),
    "parts beside a text": ("messages", {"messages": turns("q é", [part("a")])}, PAIR),
    "parts of turns": (
        "sharegpt",
        {"conversations": turns([part("q é")], "a", roles=("human", "gpt"), role="from", text="value")},
        PAIR,
    ),
    "conversations with roles": ("messages", {"conversations": turns("q é", "a")}, PAIR),
    "a system beside messages": ("messages", {"messages": turns("q é", "a"), "system": "s"}, WITH_SYSTEM),
    "a system beside turns": (
        "sharegpt",
        {"system": "s", "conversations": turns("q é", "a", roles=("human", "gpt"), role="from", text="value")},
        WITH_SYSTEM,
    ),
    "a system beside tools": (
        "messages",
        {"tools": [{"name": "f"}], "system": "s", "messages": turns("q é", "a")},
        (Message("tools", '[{"name": "f"}]'), *WITH_SYSTEM),
    ),
    "an empty system": ("messages", {"messages": turns("q é", "a"), "system": None}, PAIR),
    "messages beside empty conversations": ("messages", {"conversations": None, "messages": turns("q é", "a")}, PAIR),
    "conversations beside empty messages": ("messages", {"messages": [], "conversations": turns("q é", "a")}, PAIR),
    "completion": ("prompt", {"prompt": "q é", "completion": "a"}, PAIR),
    "response to a prompt": ("prompt", {"prompt": "q é", "response": "a", "system": "s"}, WITH_SYSTEM),
    "response beside no completion": ("prompt", {"prompt": "q é", "response": "a", "completion": None}, PAIR),
    "lists": ("prompt", {"prompt": turns("q é"), "completion": [{"role": "assistant", "content": "a"}]}, PAIR),
    "lists with earlier answers": (
        "prompt",
        {"prompt": turns("p", "b", "q é"), "completion": [{"role": "assistant", "content": "a"}]},
        EARLIER,
    ),
    "output": ("alpaca", {"instruction": "q é", "input": "", "output": "a"}, PAIR),
    "history": (
        "alpaca",
        {"instruction": "q é", "output": "a", "history": [["h", "b"]]},
        (Message("user", "h"), Message("assistant", "b"), *PAIR),
    ),
    "response to an instruction": ("alpaca", {"instruction": "q é", "response": "a", "system": "s"}, WITH_SYSTEM),
}


def read(source, form):
    return list(read_chats(source, form, split="train", malformed=Malformed(skip=False)))


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_the_conversation_that_it_says(tmp_path, name):
    form, record, expected = SHAPES[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    assert [conversation.messages for conversation in read(f"jsonl:{tmp_path}/a.jsonl", form)] == [expected]


def test_parts_in_tables_have_the_keys_of_all_parts(tmp_path):
    records = [{"messages": PARTS}, {"messages": turns([part("q é", image=None)], [part("a", image=None)])}]
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    assert [conversation.messages for conversation in read(f"parquet:{tmp_path}/a.parquet", "messages")] == [PAIR] * 2


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        ("messages", {"messages": turns([part("a"), {"type": "image_url"}])}, "turn 0 has a part of type 'image_url'"),
        ("messages", {"messages": turns([{"type": "text"}])}, "turn 0 has a part of type 'text'; only text"),
        ("messages", {"messages": turns(["text"])}, "turn 0 has a part of type 'str'"),
        ("messages", {"messages": turns("q", "a"), "system": 1}, "the 'content' of 'system' is int, not text"),
        (
            "messages",
            {"messages": [{"role": "developer", "content": "s"}, *turns("q", "a")], "system": "s"},
            "it has a 'system' and a turn of the system: keep one of them",
        ),
        ("messages", {"messages": turns("q", "a"), "functions": [{"name": "f"}]}, "'functions', OpenAI's old form"),
        (
            "messages",
            {"messages": turns("q", "a"), "conversations": turns("r", "b")},
            "it has 'messages' and 'conversations': keep one of them",
        ),
        ("messages", {"messages": turns([{"type": ["text"], "text": "a"}])}, r"a part of type \['text'\]"),
        ("messages", {"messages": turns([])}, "the content of turn 0 is an empty list"),
        ("prompt", {"prompt": "q", "completion": "a", "response": "b"}, "'completion' and 'response': keep the one"),
        ("alpaca", {"instruction": "q", "output": "a", "response": "b"}, "'output' and 'response': keep the one"),
        ("prompt", {"prompt": turns("q"), "completion": []}, "no 'completion' or 'response'; it has: prompt, compl"),
        ("prompt", {"prompt": [3], "completion": "a"}, "turn 0 is not an object with 'role' and 'content'"),
        ("alpaca", {"instruction": "q", "output": "a", "history": 5}, "'history' is not a list of"),
        ("alpaca", {"instruction": turns("q"), "output": "a"}, "'instruction' is list, not text"),
        (
            "alpaca",
            {"instruction": "q", "output": "a", "history": ["h"]},
            "'history' is not a list of",
        ),
        (
            "messages",
            {"messages": [*turns("q"), {"role": "assistant", "content": "", "refusal": "No."}]},
            "turn 1 has a 'refusal' beside its 'content'",
        ),
    ],
)
def test_what_is_no_text_is_named(tmp_path, form, record, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{message}"):
        read(f"jsonl:{tmp_path}/a.jsonl", form)


RECORDS = {
    "documents": {"text": "a"},
    "sharegpt": {"conversations": turns("q", "a", roles=("human", "gpt"), role="from", text="value")},
    "messages": {"messages": turns("q", "a")},
    "alpaca": {"instruction": "q", "output": "a"},
    "prompt": {"prompt": "q", "response": "a"},
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", RECORDS)
def test_a_record_of_another_shape_names_the_format_that_reads_it(tmp_path, form, kind):
    """And that format does."""
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(RECORDS[form]))
    else:
        datasets.Dataset.from_list([RECORDS[form]]).to_parquet(tmp_path / "a.parquet")
    source, tokenizer = f"{kind}:{tmp_path}/a.{kind}", load_tokenizer("bytes")
    for other in RECORDS:
        for skip in (False, True) if other != form else ():
            with pytest.raises(ValueError, match=rf"a\.{kind}:\d: .*It can be read with .*--format={form}\b"):
                open_or_build(tmp_path / "s", StoreOptions(source, format=other, skip_malformed=skip), tokenizer)
    assert open_or_build(tmp_path / "s", StoreOptions(source, format=form, held_out=0.0), tokenizer)


def test_faults_other_than_the_shape_name_no_format(tmp_path):
    chats = {"messages": turns("q", "a", roles=("nobody", "assistant")), "text": "a"}
    for form, record, weight in (("messages", chats, ""), ("documents", {"text": "a", "w": -1}, "w")):
        (tmp_path / "a.jsonl").write_text(json.dumps(record))
        options = StoreOptions(f"jsonl:{tmp_path}/a.jsonl", format=form, weight_field=weight)
        with pytest.raises(ValueError, match=r"a\.jsonl:1: ") as caught:
            open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
        assert "It can be read" not in str(caught.value)


def test_fields_with_text_and_columns_of_tokens_are_named_too(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a", "n": 1, "empty": ""}')
    with pytest.raises(
        ValueError, match=r"no field 'text'; it has: body, n, empty. It can be read with --field=body\."
    ):
        open_or_build(tmp_path / "s", StoreOptions(f"jsonl:{tmp_path}/a.jsonl"), load_tokenizer("bytes"))
    with pytest.raises(ValueError, match=r"It can be read with --format=documents --field=body\."):
        open_or_build(
            tmp_path / "s", StoreOptions(f"jsonl:{tmp_path}/a.jsonl", format="messages"), load_tokenizer("bytes")
        )
    datasets.Dataset.from_list([{"input_ids": [1, 2]}]).to_parquet(tmp_path / "ids.parquet")
    datasets.Dataset.from_list([RECORDS["messages"]]).to_parquet(tmp_path / "chats.parquet")
    for name, form, way in (
        ("ids", "documents", "tokens"),
        ("ids", "messages", "tokens"),
        ("chats", "tokens", "messages"),
    ):
        options = StoreOptions(f"parquet:{tmp_path}/{name}.parquet", format=form)
        with pytest.raises(ValueError, match=f"It can be read with --format={way}"):
            open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
