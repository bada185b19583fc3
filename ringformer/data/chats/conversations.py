"""Conversations: ShareGPT records, OpenAI messages and Alpaca's instructions, read from JSON, JSON lines or tables.

sharegpt   {"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
messages   {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], "tools": [...]}
alpaca     {"instruction": ..., "input": ..., "output": ..., "system": ...}; input and system may be absent

An assistant's message may have `tool_calls`, and then no content; messages of the role `tool` answer them. As in
OpenAI's files for finetuning, an assistant's message of `weight` 0 is not trained on.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ringformer.data.sources.records import Malformed, read_rows, weight_of

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "developer": "system",
    "tool": "tool",
}
ChatFormat = Literal["sharegpt", "messages", "alpaca"]
FORMATS: dict[ChatFormat, tuple[str, str, str]] = {
    "sharegpt": ("conversations", "from", "value"),
    "messages": ("messages", "role", "content"),
    "alpaca": ("messages", "role", "content"),
}
"""Keys of a record's turns, and of a turn's speaker and text; Alpaca's records become messages first."""
EXTRA = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
"""Keys of a message besides its text that chat templates read, by its role."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool; or tools, before the first turn: the functions that may be called, as JSON."""
    content: str
    extra: str = ""
    """JSON object of the message's `EXTRA` keys; empty without any."""
    trained: bool = True
    """False for an answer that is not trained on."""


class Conversation(NamedTuple):
    """The turns of a record, and its name in errors: a path and line."""

    messages: tuple[Message, ...]
    name: str
    weight: float = 1.0
    """Number of copies that training gets."""


def read_chats(
    source: str, chat_format: ChatFormat, *, split: str, malformed: Malformed, weight_field: str = ""
) -> Iterator[Conversation]:
    """Read the conversations of `source`, and report unreadable records to `malformed`.

    Raises:
      ValueError: for an unknown format.
    """
    if chat_format not in FORMATS:
        raise ValueError(f"unknown chat format {chat_format!r}; known: {', '.join(FORMATS)}")
    for record, name in read_rows(source, split=split, malformed=malformed):
        try:
            turns = _instruction(record) if chat_format == "alpaca" else record
            messages = _messages(turns, *FORMATS[chat_format])
            weight = weight_of(record, weight_field)
        except ValueError as error:
            malformed(f"{name}: {error}")
            continue
        yield Conversation(messages, name, weight)


def _instruction(record: dict[str, Any]) -> dict[str, Any]:
    """Return the messages of one of Alpaca's records."""
    values = {key: record.get(key) or "" for key in ("system", "instruction", "input", "output")}
    for key, value in values.items():
        if type(value) is not str:
            raise ValueError(f"{key!r} is {type(value).__name__}, not text")
        if not value and key in ("instruction", "output"):
            raise ValueError(f"no {key!r}; it has: {', '.join(record) or 'nothing'}")
    question = "\n\n".join(filter(None, (values["instruction"], values["input"])))
    turns = ("system", values["system"]), ("user", question), ("assistant", values["output"])
    return {"messages": [{"role": role, "content": text} for role, text in turns if text]}


def _messages(record: dict[str, Any], turns_key: str, role_key: str, text_key: str) -> tuple[Message, ...]:
    turns, tools = record.get(turns_key), record.get("tools")
    if not isinstance(turns, list):
        raise ValueError(f"no list {turns_key!r}; it has: {', '.join(record) or 'nothing'}")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except ValueError:
        raise ValueError("its 'tools' are not JSON") from None
    if tools and not isinstance(tools, list):
        raise ValueError(f"its 'tools' are {type(tools).__name__}, not a list")
    messages = [Message("tools", json.dumps(_without_nulls(tools)))] if tools else []
    for i, turn in enumerate(turns):
        calls = isinstance(turn, dict) and bool(turn.get("tool_calls"))
        if not isinstance(turn, dict) or role_key not in turn or not (text_key in turn or calls):
            raise ValueError(f"turn {i} is not an object with {role_key!r} and {text_key!r}")
        if turn.get("function_call"):
            raise ValueError(f"turn {i} has a function_call, OpenAI's old form: write it as tool_calls")
        role: Any = turn[role_key]
        text: Any = turn.get(text_key)
        extra = _extra(turn, EXTRA.get(role, ()) if type(role) is str else (), i)
        if text is None and "tool_calls" in extra:
            text = ""
        for key, value in ((role_key, role), (text_key, text)):
            if type(value) is not str:
                raise ValueError(f"the {key!r} of turn {i} is {type(value).__name__}, not text")
        if role not in ROLES:
            raise ValueError(f"turn {i} is by {reprlib.repr(role)}; known: {', '.join(ROLES)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"turn {i} cannot be written as UTF-8: {error}") from None
        if (weight := turn.get("weight")) not in (None, 0, 1):
            raise ValueError(f"the 'weight' of turn {i} is {reprlib.repr(weight)}; it must be 0 or 1")
        messages.append(Message(ROLES[role], text, json.dumps(extra) if extra else "", weight != 0))
    return tuple(messages)


def _extra(turn: Mapping[str, Any], keys: Sequence[str], i: int) -> dict[str, Any]:
    """Return those of the keys of a turn that have a value, with the arguments of calls as objects."""
    extra = {key: _without_nulls(turn[key]) for key in keys if turn.get(key)}
    calls = extra.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"the 'tool_calls' of turn {i} are {type(calls).__name__}, not a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or type(function.get("name")) is not str:
            raise ValueError(f"a call of turn {i} has no function with a name")
        if type(arguments := function.get("arguments")) is str:  # OpenAI writes JSON text, templates read objects
            try:
                function["arguments"] = json.loads(arguments)
            except ValueError:
                raise ValueError(f"the arguments of {function['name']} in turn {i} are not JSON") from None
    return extra


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys that have no value: tables give every object the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
