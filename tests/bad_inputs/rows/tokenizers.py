"""Tokenizers and chat templates."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bad_inputs.runner import Content, Row

HUGE = 10**400
PREPARE = "data prepare --source=jsonl:toys/documents.jsonl --store=row/store --tokenizer=row/t"
CHATS = (
    "data prepare --source=jsonl:toys/chats.jsonl --store=row/store --format=messages --held_out=0 "
    "--template=tokenizer --tokenizer=row/t"
)


def _changed(file: str, change: Callable[[dict[str, Any]], Any]) -> Content:
    """Write a file of the toy tokenizer with a change."""

    def write(path: Path) -> None:
        values = json.loads(path.read_text())
        changed = change(values)
        path.write_text(json.dumps(values if changed is None else changed))

    return write


def _tokenizer(name: str, change: Callable[[dict[str, Any]], Any], **more) -> Row:
    """A change of tokenizer.json."""
    return Row(
        f"tokenizer.json: {name}",
        PREPARE,
        copies={"t": "tokenizer"},
        files={"t/tokenizer.json": _changed("tokenizer.json", change)},
        **more,
    )


def _settings(name: str, change: Callable[[dict[str, Any]], Any], command: str = PREPARE, **more) -> Row:
    """A change of tokenizer_config.json."""
    return Row(
        f"tokenizer_config.json: {name}",
        command,
        copies={"t": "tokenizer"},
        files={"t/tokenizer_config.json": _changed("tokenizer_config.json", change)},
        **more,
    )


def _template(name: str, template: Any, command: str = CHATS, **more) -> Row:
    def change(values: dict[str, Any]) -> None:
        values["chat_template"] = template

    return _settings(f"template {name}", change, command, **more)


def _add(i: Any, content: Any = "<|new|>") -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        values["added_tokens"].append(values["added_tokens"][0] | {"id": i, "content": content})

    return change


def _vocab(piece: str, i: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        values["model"]["vocab"][piece] = i

    return change


def _set(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        values.update(changes)

    return change


def _regex(pattern: str) -> Callable[[dict[str, Any]], None]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _set(pre_tokenizer={"type": "Sequence", "pretokenizers": [split]})


ROWS = [
    *[
        Row(f"tokenizer.json is {name}", PREPARE, copies={"t": "tokenizer"}, files={"t/tokenizer.json": content})
        for name, content in {
            "empty": "",
            "a list": "[]",
            "null": "null",
            "an object": "{}",
            "a number": "3",
            "deep": "[" * 100_000,
            "binary": b"\0\xff",
            "cut": '{"version": "1.0"',
            "a byte order mark": b"\xef\xbb\xbf{}",
        }.items()
    ],
    _tokenizer("a huge id in the vocabulary", _vocab("zzz", 2**32 - 1)),
    _tokenizer("a large id in the vocabulary", _vocab("zzz", 2**31)),
    _tokenizer("an id beyond 32 bits", _vocab("zzz", 2**32)),
    _tokenizer("an id of 10**400", _vocab("zzz", HUGE)),
    _tokenizer("a negative id", _vocab("zzz", -1)),
    _tokenizer("an id that is a text", _vocab("zzz", "1")),
    _tokenizer("an id that is a float", _vocab("zzz", 1.5)),
    _tokenizer("an id that is null", _vocab("zzz", None)),
    _tokenizer("an added token with a huge id", _add(2**32 - 1)),
    _tokenizer("an added token with a large id", _add(10**9)),
    _tokenizer("an added token with a negative id", _add(-1)),
    _tokenizer("an added token without content", _add(500, "")),
    _tokenizer("an added token whose content is a number", _add(500, 3)),
    _tokenizer("an added token with a lone surrogate", _add(500, "\ud800")),
    _tokenizer("an added token of another token's id", _add(7)),
    _tokenizer("added tokens are a number", _set(added_tokens=3)),
    _tokenizer("added tokens are numbers", _set(added_tokens=[3])),
    _tokenizer("added tokens are null", _set(added_tokens=None)),
    _tokenizer("no model", _set(model=None)),
    _tokenizer("an unknown model", _set(model={"type": "X"})),
    _tokenizer("a model without a vocabulary", _set(model={"type": "BPE"})),
    _tokenizer(
        "an empty vocabulary",
        _set(model={"type": "BPE", "vocab": {}, "merges": []}),
        harmless="the report says how few tokens there are",
    ),
    _tokenizer("merges of nothing", lambda values: values["model"].update(merges=["zz zz"])),
    _tokenizer("merges are numbers", lambda values: values["model"].update(merges=[3])),
    _tokenizer("a Unigram with NaN", _set(model={"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 0})),
    _tokenizer("a Unigram of another unknown", _set(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7})),
    _tokenizer("an empty Unigram", _set(model={"type": "Unigram", "vocab": [], "unk_id": None})),
    _tokenizer(
        "a WordPiece",
        _set(
            model={
                "type": "WordPiece",
                "vocab": {"a": 0},
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            }
        ),
    ),
    _tokenizer(
        "a WordLevel without its unknown", _set(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"})
    ),
    _tokenizer("a bad regex", _regex("(((")),
    replace(
        _tokenizer("a regex that trips its limit", _regex(r"(\w+\s?)+$"), variables={"RUST_BACKTRACE": "0"}),
        command=PREPARE.replace("toys/documents", "toys/words"),
    ),
    _tokenizer("a regex that matches nothing", _regex(""), harmless="the text is not split"),
    _tokenizer("a pre-tokenizer of another kind", _set(pre_tokenizer={"type": "X"})),
    _tokenizer(
        "a normalizer that removes everything",
        _set(normalizer={"type": "Replace", "pattern": {"Regex": "[^x]"}, "content": ""}),
        harmless="the report says how few tokens there are",
    ),
    _tokenizer(
        "a normalizer that multiplies",
        _set(normalizer={"type": "Replace", "pattern": {"String": "r"}, "content": "r" * 100}),
        harmless="the text becomes longer; --max_document_bytes limits it",
    ),
    _tokenizer(
        "truncation to nothing",
        _set(truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}),
        harmless="texts are encoded without it",
    ),
    _tokenizer(
        "padding to much",
        _set(
            padding={
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        ),
        harmless="texts are encoded without it",
    ),
    _settings("a list", lambda _: [1]),
    _settings("eos_token is a number", _set(eos_token=3)),
    _settings("eos_token is a list", _set(eos_token=[])),
    _settings("eos_token is unknown", _set(eos_token="<|nothing|>")),
    _settings("eos_token is deep", _set(eos_token={"content": {"content": "x"}})),
    _settings("bos_token is a number", _set(bos_token=3)),
    _settings("added_tokens_decoder is a list", _set(added_tokens_decoder=[1]), harmless="it names no token"),
    _settings("added_tokens_decoder has numbers", _set(added_tokens_decoder={"x": 3}), harmless="it names no token"),
    _settings("extra_special_tokens are numbers", _set(extra_special_tokens=[1]), harmless="it names no token"),
    *[
        Row(
            f"tokenizer {name!r:.30}",
            f"data prepare --source=jsonl:toys/documents.jsonl --store=row/store --tokenizer='{name}'",
            files={"e/x": "", "m.model": b"hello", "z.model": b""},
        )
        for name in (
            "",
            "nothing",
            "row/e",
            "row/m.model",
            "toys/config.py",
            "/dev/null",
            "toys/hf/config.json",
            "a\0b",
            "x" * 5000,
            "hf://",
            "hf://a",
        )
    ],
    Row("tokenizer.json is a folder", PREPARE, files={"t/tokenizer.json/x": ""}),
    Row("tokenizer.json is a fifo", PREPARE, files={"t/tokenizer.json": lambda path: os.mkfifo(path)}),
    _template("is missing", None),
    _template("is a number", 3),
    _template("is a list of numbers", [3]),
    _template("is a syntax error", "{% for %}"),
    _template("is not closed", "{{ messages"),
    _template("loops for ever", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    _template("writes much", "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"),
    _template("takes much memory", "{{ 'a' * 10**10 }}"),
    _template("takes a power", "{{ 10**10**10 }}"),
    _template("has a long range", "{% for a in range(10**12) %}{% endfor %}"),
    _template("recurses", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    _template("is nested", "{% if true %}" * 3000 + "{% endif %}" * 3000),
    _template("is a deep expression", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"),
    _template("imports", "{% import 'os' as os %}"),
    _template("includes a file", "{% include '/etc/passwd' %}"),
    _template("leaves the sandbox", "{{ ''.__class__.__mro__ }}"),
    _template("calls what is missing", "{{ nothing() }}"),
    _template("divides by zero", "{{ 1 // 0 }}"),
    _template("refuses", "{{ raise_exception('no') }}"),
    _template("writes nothing", ""),
    _template("writes a surrogate", "{{ '\\ud800' }}"),
    _template("asks for the date", "{{ strftime_now('%Y') }}"),
    _template("writes lipsum", "{{ lipsum() }}"),
    _template(
        "leaves out answers", "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    *[
        Row(
            f"template_option {option[:20]!r}",
            f"generate --run=toys/model --chat --prompt=a --template=tokenizer '--template_option={option}'",
        )
        for option in ("", "x", "=1", "x=1", "x=1,x=2", "messages=1", "x=" + "[" * 100_000, "x=NaN", "x=" + "1" * 5000)
    ],
    Row("template_option without chat", "generate --run=toys/model --prompt=a --template_option=x=1"),
    Row(
        "template llama2 without its tokens",
        "data prepare --source=jsonl:toys/chats.jsonl --store=row/store --format=messages --template=llama3",
    ),
    Row("chat without a template", "generate --run=toys/run --chat --prompt=a"),
]
