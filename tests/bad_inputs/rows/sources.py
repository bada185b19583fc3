"""Documents and conversations that become token stores."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.bad_inputs.runner import Content, Row

DEEP = "[" * 100_000
LONG = "1" * 5000


def table(*columns: tuple[str, pa.Array]) -> Content:
    """Write a Parquet file."""

    def write(path: Path) -> None:
        names = [name for name, _ in columns]
        parquet.write_table(pa.Table.from_arrays([column for _, column in columns], names=names), path)

    return write


def stream(*columns: tuple[str, pa.Array]) -> Content:
    """Write an Arrow stream."""

    def write(path: Path) -> None:
        names = [name for name, _ in columns]
        whole = pa.Table.from_arrays([column for _, column in columns], names=names)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, whole.schema) as writer:
            writer.write_table(whole)

    return write


TEXTS = ("text", pa.array(["a ring", "a block"]))
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
MESSAGES = ("messages", pa.array([TURNS, TURNS]))
FAR = pa.array([2**62, -(2**62)], pa.int64())
DATES = {
    "timestamps": FAR.view(pa.timestamp("us")),
    "nanoseconds": FAR.view(pa.timestamp("ns")),
    "timestamps of a zone": FAR.view(pa.timestamp("us", "UTC")),
    "an unknown zone": FAR.view(pa.timestamp("us", "Nowhere/Here")),
    "dates": pa.array([2**31 - 1, -(2**31)], pa.int32()).view(pa.date32()),
    "durations": FAR.view(pa.duration("s")),
    "times": FAR.view(pa.time64("us")),
}


def _nested(levels: int) -> pa.Array:
    """Lists in lists."""
    array = pa.array([1, 2])
    for _ in range(levels):
        array = pa.ListArray.from_arrays(pa.array(np.arange(len(array) + 1), pa.int32()), array)
    return array


def _documents(kind: str, name: str, content: Content, options: str = "", **more) -> Row:
    return Row(
        f"{kind}: {name}",
        f"data prepare --source={kind}:row/d --store=row/store --held_out=0 {options}",
        files={"d": content},
        **more,
    )


def _chats(kind: str, name: str, content: Content, options: str = "", **more) -> Row:
    options = f"--format=messages {options}"
    return _documents(kind, name, content, options, **more)


def _calls(arguments: object, **more) -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return json.dumps({"messages": turns, **more}) + "\n" + json.dumps({"messages": TURNS}) + "\n"


def _levels(count: int) -> dict:
    value: dict = {}
    for _ in range(count):
        value = {"a": value}
    return value


OWN = "--template=tokenizer --tokenizer=toys/tokenizer"

ROWS = [
    *[
        _documents("jsonl", name, content)
        for name, content in {
            "empty": "",
            "blank": "\n \n",
            "deep": DEEP,
            "null": "null",
            "a list": "[]",
            "no field": '{"a": 1}',
            "a number for a text": '{"text": 3}',
            "null for a text": '{"text": null}',
            "NaN for a text": '{"text": NaN}',
            "true for a text": '{"text": true}',
            "empty text": '{"text": ""}',
            "cut": '{"text": "a',
            "two values": '{"text": "a"} {}',
            "long number": '{"text": "a", "x": ' + LONG + "}",
            "UTF-16": '{"text": "a"}'.encode("utf-16"),
            "NUL": b"\0",
            "twice": '{"text": "a", "text": 3}',
            "a list of texts": '{"text": ["a"]}',
        }.items()
    ],
    _documents("jsonl", "a lone surrogate", '{"text": "\\ud800"}', options="--tokenizer=toys/tokenizer"),
    _documents("jsonl", "not UTF-8", b'{"text": "\xff"}'),
    _documents("jsonl", "weight is NaN", '{"text": "a", "w": NaN}', options="--weight_field=w"),
    _documents("jsonl", "weight is huge", '{"text": "a", "w": 1' + "0" * 400 + "}", options="--weight_field=w"),
    _documents("jsonl", "weight is negative", '{"text": "a", "w": -1}', options="--weight_field=w"),
    _documents("jsonl", "weight is a text", '{"text": "a", "w": "1"}', options="--weight_field=w"),
    _documents("jsonl", "weight is missing", '{"text": "a"}', options="--weight_field=w"),
    _documents("jsonl", "all weights are 0", '{"text": "a", "w": 0}', options="--weight_field=w"),
    *[
        _documents("json", name, content)
        for name, content in {
            "empty": "",
            "deep": DEEP,
            "an object": "{}",
            "cut": '[{"text": "a"}',
            "no comma": '[{"text": "a"} {"text": "b"}]',
            "numbers": "[1, 2]",
            "nothing": "[]",
            "a byte order mark and nothing": b"\xef\xbb\xbf[]",
        }.items()
    ],
    _documents("jsonl", "all skipped", DEEP + "\nnull\n", options="--skip_malformed"),
    _documents("jsonl", "tokens", '{"input_ids": [1]}', options="--format=tokens"),
    *[
        _chats("jsonl", name, json.dumps(content))
        for name, content in {
            "messages is a text": {"messages": "a"},
            "messages is null": {"messages": None},
            "messages is empty": {"messages": []},
            "turns are numbers": {"messages": [1, 2]},
            "role is a number": {"messages": [{"role": 3, "content": "a"}]},
            "role is unknown": {"messages": [{"role": "x" * 5000, "content": "a"}]},
            "content is a number": {"messages": [{"role": "user", "content": 3}]},
            "content is a list of numbers": {"messages": [{"role": "user", "content": [1]}]},
            "content is an image": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message's weight is a text": {"messages": [*TURNS[:1], {**TURNS[1], "weight": "1"}]},
            "tools are a number": {"messages": TURNS, "tools": 3},
            "tools are no JSON": {"messages": TURNS, "tools": "{"},
            "no messages": {},
            "a surrogate": {"messages": [{"role": "user", "content": "\ud800"}, TURNS[1]]},
            "only questions": {"messages": TURNS[:1]},
        }.items()
    ],
    *[_chats("jsonl", f"arguments of {levels} levels", _calls(_levels(levels)), options=OWN) for levels in (250, 900)],
    *[
        _chats("jsonl", f"arguments of {levels} levels in JSON", _calls(json.dumps(_levels(levels))), options=OWN)
        for levels in (250, 900)
    ],
    *[
        _chats("jsonl", f"tools of {levels} levels", _calls({}, tools=[_levels(levels)]), options=OWN)
        for levels in (250, 900)
    ],
    _chats("jsonl", "arguments of 100,000 levels", _calls("[" * 100_000), options=OWN),
    _chats(
        "jsonl",
        "arguments of 900 levels, skipped",
        _calls(_levels(900)),
        options=f"{OWN} --skip_malformed",
        harmless="the record is skipped and counted",
    ),
    _chats(
        "jsonl",
        "tools of 900 levels, skipped",
        _calls({}, tools=[_levels(900)]),
        options=f"{OWN} --skip_malformed",
        harmless="the record is skipped and counted",
    ),
    _chats(
        "jsonl",
        "arguments of 100,000 levels, skipped",
        _calls("[" * 100_000),
        options=f"{OWN} --skip_malformed",
        harmless="the record is skipped and counted",
    ),
    *[
        _documents("parquet", name, content)
        for name, content in {
            "empty": b"",
            "no table": b"hello",
            "only magic": b"PAR1PAR1",
            "no rows": table(("text", pa.array([], pa.string()))),
            "no columns": table(),
            "numbers": table(("text", pa.array([1, 2]))),
            "nulls": table(("text", pa.array([None, None], pa.string()))),
            "only nulls": table(("text", pa.nulls(2))),
            "bytes": table(("text", pa.array([b"\xff", b"a"]))),
            "no field": table(("other", pa.array(["a"]))),
            "lists": table(("text", pa.array([["a"], ["b"]]))),
            "dates for texts": table(("text", DATES["dates"])),
            "duplicate columns": table(TEXTS, TEXTS),
            "decimals": table(("text", pa.array([1, 2]).cast(pa.decimal128(38, 2)))),
        }.items()
    ],
    *[
        _documents("arrow", name, content)
        for name, content in {
            "empty": b"",
            "no table": b"hello",
            "only magic": b"ARROW1\0\0",
            "duplicate columns": stream(TEXTS, TEXTS),
            "nulls": stream(("text", pa.nulls(2))),
            "nothing": stream(),
        }.items()
    ],
    *[
        _documents(
            "parquet",
            f"{name} in an unused column",
            table(TEXTS, ("when", column)),
            harmless="nothing reads the column",
        )
        for name, column in DATES.items()
    ],
    *[
        _chats(
            "parquet",
            f"chats, and {name} in an unused column",
            table(MESSAGES, ("when", column)),
            harmless="nothing reads the column",
        )
        for name, column in DATES.items()
    ],
    _documents("parquet", "a record whose field is missing beside dates", table(("when", DATES["timestamps"]))),
    _documents("parquet", "weights are dates", table(TEXTS, ("w", DATES["timestamps"])), options="--weight_field=w"),
    _chats("parquet", "chats: duplicate columns", table(MESSAGES, MESSAGES)),
    _chats("parquet", "chats: duplicate columns beside", table(MESSAGES, TEXTS, TEXTS)),
    _chats(
        "parquet",
        "chats: a column of lists in lists",
        table(MESSAGES, ("deep", _nested(30))),
        harmless="nothing reads the column",
    ),
    _chats(
        "arrow",
        "chats: a column of 40 lists in lists",
        stream(MESSAGES, ("deep", _nested(40))),
        harmless="nothing reads the column",
    ),
    _chats("arrow", "chats: duplicate columns", stream(MESSAGES, MESSAGES)),
    _chats("arrow", "chats: dates", stream(MESSAGES, ("when", DATES["dates"])), harmless="nothing reads the column"),
    _documents("parquet", "tokens: texts", table(("input_ids", pa.array(["a", "b"]))), options="--format=tokens"),
    _documents(
        "parquet",
        "tokens: nulls",
        table(("input_ids", pa.array([[None, 1], None], pa.list_(pa.int64())))),
        options="--format=tokens",
    ),
    _documents(
        "parquet",
        "tokens: duplicate columns",
        table(("input_ids", pa.array([[1]])), ("input_ids", pa.array([[1]]))),
        options="--format=tokens",
    ),
    _documents(
        "parquet",
        "tokens: unsigned",
        table(("input_ids", pa.array([[2**64 - 1]], pa.list_(pa.uint64())))),
        options="--format=tokens",
    ),
    _documents("parquet", "tokens: floats", table(("input_ids", pa.array([[1.5]]))), options="--format=tokens"),
    Row("source is empty", "data prepare --source= --store=row/store"),
    Row("source is unknown", "data prepare --source=nothing --store=row/store"),
    Row("source has no place", "data prepare --source=jsonl: --store=row/store"),
    Row("source is of nothing", "data prepare --source=jsonl:row/nothing --store=row/store"),
    Row("source has a NUL", "data prepare --source=jsonl:row/a\0b --store=row/store"),
    Row("source has a long name", f"data prepare --source=jsonl:row/{'x' * 5000} --store=row/store"),
    Row("source is a bad pattern", "data prepare --source='jsonl:row/[' --store=row/store"),
    Row(
        "source is a fifo",
        "data prepare --source=jsonl:row/p --store=row/store",
        files={"p": lambda path: os.mkfifo(path)},
    ),
    Row("source is /dev/null", "data prepare --source=jsonl:/dev/null --store=row/store"),
    Row(
        "source is a dangling link",
        "data prepare --source=jsonl:row/l --store=row/store",
        files={"l": lambda path: path.symlink_to("nothing")},
    ),
    Row(
        "source is a link to itself",
        "data prepare --source=text:row/l --store=row/store",
        files={"l": lambda path: path.symlink_to("l")},
    ),
    Row(
        "source is a dataset with a deep state",
        "data prepare --source=datasets:row/d --store=row/store",
        files={"d/state.json": DEEP},
    ),
    Row(
        "source is a dataset with a deep list of splits",
        "data prepare --source=datasets:row/d --store=row/store",
        files={"d/dataset_dict.json": DEEP},
    ),
    Row(
        "source is a dataset with an empty state",
        "data prepare --source=datasets:row/d --store=row/store",
        files={"d/state.json": "{}"},
    ),
    Row(
        "source is compressed by name",
        "data prepare --source=jsonl:row/d.gz --store=row/store",
        files={"d.gz": "hello"},
    ),
    Row("source is zstd by name", "data prepare --source=jsonl:row/d.zst --store=row/store", files={"d.zst": "hello"}),
    Row("source is an empty gzip", "data prepare --source=jsonl:row/d.gz --store=row/store", files={"d.gz": ""}),
    Row("encoding is unknown", "data prepare --source=jsonl:toys/documents.jsonl --store=row/store --encoding=nothing"),
    Row(
        "encoding is no text's", "data prepare --source=jsonl:toys/documents.jsonl --store=row/store --encoding=base64"
    ),
    Row("join is unknown", "data prepare --source=text:row --store=row/store --join=x", files={"a": "a"}),
    Row("clean is unknown", "data prepare --source=jsonl:toys/documents.jsonl --store=row/store --clean=x"),
    Row(
        "html is nested",
        "data prepare --source=jsonl:row/d --store=row/store --held_out=0 --clean=html",
        files={"d": json.dumps({"text": "<div>" * 20000 + "a" + "</div>" * 20000})},
    ),
    Row(
        "answers of nested html",
        "data prepare --source=jsonl:row/d --store=row/store --held_out=0 --format=messages --clean=html",
        files={
            "d": json.dumps(
                {"messages": [TURNS[0], {"role": "assistant", "content": "<div>" * 20000 + "a" + "</div>" * 20000}]}
            )
        },
    ),
    Row(
        "tokenizer of nothing",
        "data tokenizer --source=jsonl:row/d --out=row/t.model --vocab_size=300",
        files={"d": ""},
    ),
    Row(
        "tokenizer of null",
        "data tokenizer --source=jsonl:row/d --out=row/t.model --vocab_size=300",
        files={"d": "null"},
    ),
    Row(
        "tokenizer of short text",
        "data tokenizer --source=jsonl:row/d --out=row/t.model --vocab_size=300",
        files={"d": '{"text": "a"}'},
    ),
    Row(
        "tokenizer of NULs",
        "data tokenizer --source=jsonl:row/d --out=row/t.model --vocab_size=300",
        files={"d": '{"text": "' + "\\u0000" * 9 + '"}'},
    ),
    Row(
        "haystack is empty",
        "eval needle --run=toys/model --lengths=100 --haystack=row/h --out=row/out",
        files={"h": ""},
    ),
    Row(
        "haystack is not UTF-8",
        "eval needle --run=toys/model --lengths=100 --haystack=row/h --out=row/out",
        files={"h": b"\xff"},
    ),
    Row("haystack is a folder", "eval nolima --run=toys/model --lengths=100 --haystack=toys --out=row/out"),
    Row(
        "haystack is a space",
        "eval nolima --run=toys/model --lengths=100 --haystack=row/h --out=row/out",
        files={"h": " \n "},
    ),
    Row(
        "text of mrcr is empty", "eval mrcr --run=toys/model --lengths=100 --text=row/h --out=row/out", files={"h": ""}
    ),
    Row("text of mrcr is a folder", "eval mrcr --run=toys/model --lengths=100 --text=toys --out=row/out"),
    Row("words of ruler are missing", "eval ruler --run=toys/model --lengths=100 --tasks=vt --words=row --out=row/out"),
    Row(
        "words of ruler are empty",
        "eval ruler --run=toys/model --lengths=100 --tasks=niah_single_1 --words=row/w --out=row/out",
        files={"w/adjectivelist.txt": "", "w/nounlist.txt": "", "w/verblist.txt": ""},
    ),
]
