"""Conversations in both formats, and what is said of those that cannot be read."""

import json
import re

import datasets
import pytest

from ringformer.data.chats.conversations import Conversation, Message, read_chats
from ringformer.data.sources.malformed import Malformed
from ringformer.data.sources.records import read_rows

SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q é"},
            {"from": "gpt", "value": "a"},
        ],
    },
    {"id": "y", "conversations": [{"from": "user", "value": "r"}, {"from": "chatgpt", "value": "b"}]},
]
MESSAGES = [
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q é"},
            {"role": "assistant", "content": "a"},
        ]
    },
    {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]},
]
EXPECTED = [
    (Message("system", "s"), Message("user", "q é"), Message("assistant", "a")),
    (Message("user", "r"), Message("assistant", "b")),
]


def read(source, form, skip=False):
    malformed = Malformed(skip=skip)
    return list(read_chats(source, form, split="train", malformed=malformed)), malformed.count


@pytest.mark.parametrize(("form", "records"), [("sharegpt", SHAREGPT), ("messages", MESSAGES)])
def test_json_lines_arrays_parquet_and_datasets_say_the_same(tmp_path, form, records):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.json").write_text(json.dumps(records, indent=2, ensure_ascii=False))
    dataset = datasets.Dataset.from_list(records)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(str(tmp_path / "saved"))
    names = {}
    for source in ("jsonl:a.jsonl", "json:a.json", "parquet:a.parquet", "datasets:saved"):
        kind, path = source.split(":")
        found, _ = read(f"{kind}:{tmp_path}/{path}", form)
        assert [conversation.messages for conversation in found] == EXPECTED
        names[kind] = [conversation.name.removeprefix(f"{tmp_path}/") for conversation in found]
    second = (tmp_path / "a.json").read_text().splitlines().index("  {", 2) + 1
    assert names == {
        "jsonl": ["a.jsonl:1", "a.jsonl:2"],
        "json": ["a.json:2 (record 1)", f"a.json:{second} (record 2)"],
        "parquet": ["a.parquet:0", "a.parquet:1"],
        "datasets": ["saved:0", "saved:1"],
    }


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"conversations": [', "not a line of JSON"),
        ("[]", "holds a JSON list"),
        ('{"messages": []}', "no list 'conversations'; it has: messages"),
        ('{"conversations": {}}', "no list 'conversations'"),
        ('{"conversations": ["hi"]}', "turn 0 is not an object with 'from' and 'value'"),
        ('{"conversations": [{"from": "human"}]}', "turn 0 is not an object with 'from' and 'value'"),
        ('{"conversations": [{"from": "bong", "value": ""}]}', "turn 0 is by 'bong'; known: system, human"),
        ('{"conversations": [{"from": "gpt", "value": null}]}', "the 'value' of turn 0 is NoneType"),
        ('{"conversations": [{"from": "gpt", "value": "\\ud800"}]}', "turn 0 cannot be written as UTF-8"),
    ],
)
def test_a_malformed_line_is_named_or_counted(tmp_path, bad, message):
    good = json.dumps(SHAREGPT[1])
    (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl:2.*{message}.*--skip_malformed"):
        read(f"jsonl:{tmp_path}/a.jsonl", "sharegpt")
    found, skipped = read(f"jsonl:{tmp_path}/a.jsonl", "sharegpt", skip=True)
    assert found == [Conversation(EXPECTED[1], f"{tmp_path}/a.jsonl:{line}") for line in (1, 3)]
    assert skipped == 1


DEEP = "[" * 300 + "]" * 300
PLAIN = r'null true 0 -7.5 1e999 NaN "" "x" "\ud800" "\u001b[2J" [] [[]] {} {"role":"user"} ["user"]'
JSON_VALUES = [*PLAIN.split(), "9" * 5000, DEEP, "[" * 99_999, "[" * 99_999 + "]" * 99_999]
"""One of each type, and those that parsers choke on."""


def rows_with_faults(turns_key, role_key, text_key):
    """Each JSON value as a whole row, as its turns, as one of them, as a speaker and as a text."""
    for value in JSON_VALUES:
        yield value
        yield f'{{"{turns_key}": {value}}}'
        yield f'{{"{turns_key}": [{value}]}}'
        yield f'{{"{turns_key}": [{{"{role_key}": {value}, "{text_key}": "a"}}]}}'
        yield f'{{"{turns_key}": [{{"{role_key}": "user", "{text_key}": {value}}}]}}'


def test_every_json_value_in_every_place_of_a_row_is_named_or_counted(tmp_path):
    for form, keys in (
        ("sharegpt", ("conversations", "from", "value")),
        ("messages", ("messages", "role", "content")),
        ("messages", ("conversations", "role", "content")),
    ):
        good = f'{{"{keys[0]}": [{{"{keys[1]}": "user", "{keys[2]}": "q"}}]}}'
        rows = [
            *rows_with_faults(*keys),
            f'{{"{keys[0]}": [{{"{keys[1]}": ["user"], "{keys[2]}": "q"}}], "x": {DEEP}}}',
        ]
        # These are conversations: without a turn, and of any text that can be written.
        fine = {f'{{"{keys[0]}": []}}', *(good.replace('"q"', text) for text in ('""', '"x"', r'"\u001b[2J"'))}
        assert fine < set(rows)
        for number, row in enumerate(rows):
            path = tmp_path / f"{form}-{keys[0]}-{number}.jsonl"
            path.write_text(f"{good}\n{row}\n{good}\n")
            found, skipped = read(f"jsonl:{path}", form, skip=True)
            assert (len(found), skipped) == ((3, 0) if row in fine else (2, 1)), row[:80]
            if row not in fine:
                with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:2\b.*--skip_malformed") as error:
                    read(f"jsonl:{path}", form)
                assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a JSON array of objects; for one object per line use jsonl:"),
        ('[\n{"a": 1},\n\n{"a" 2}]', r"a\.json:4 \(record 2\): the object that begins here is not JSON"),
        ('[\n{"a": 1}\n{"a": 2}]', r"a\.json:2 \(record 1\): the object that begins here is followed by"),
        ('[\n{"a": 1}', r"a\.json:2 \(record 1\): the object that begins here is followed by"),
        ('[{"a": 1},\n 7]', r"a\.json:2 \(record 2\) holds a JSON int"),
    ],
)
def test_a_broken_array_names_the_line_and_the_record(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_rows(f"json:{tmp_path}/a.json"))


def test_an_unknown_format_or_a_source_of_plain_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown chat format 'dolly'; known: sharegpt, messages, alpaca, prompt"):
        read(f"jsonl:{tmp_path}/*", "dolly")
    with pytest.raises(ValueError, match="source 'stdlib' has no records"):
        read("stdlib", "messages")
