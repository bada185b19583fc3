"""Conversations: ShareGPT records, OpenAI messages and pairs of question and answer, read from JSON, JSON lines or
tables.

sharegpt   {"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
messages   {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], "tools": [...]};
           the list may be called "conversations". In both, "system" beside the list is a system message
alpaca     {"instruction": ..., "input": ..., "output": ..., "system": ...}; input and system may be absent, and the
           output be called "response". "history" is a list of earlier [question, answer] pairs
prompt     {"prompt": ..., "completion": ..., "system": ...}; the completion may be called "response", and both may be
           lists of messages

A content is a text, or a list of parts such as {"type": "text", "text": ...}; other parts cannot be read. An
assistant's message may have `tool_calls`, and then no content; messages of the role `tool` answer them. It may have
thoughts beside its content, as `reasoning_content`, `reasoning` or `thinking`. A message may have a speaker's `name`,
which the chat template must write. As in OpenAI's files for finetuning, an
assistant's message of `weight` 0 is not trained on.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from ringformer.data.sources.malformed import Malformed, MalformedRecord
from ringformer.data.sources.records import read_rows, weight_of
from ringformer.data.sources.text_encoding import UTF_8, utf8_size
from ringformer.data.sources.text_files import check_size
from ringformer.files.json_text import check_levels, parse_json

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
ChatFormat = Literal["sharegpt", "messages", "alpaca", "prompt"]


class Turns(NamedTuple):
    """Shape of a record with a list of turns."""

    turns: tuple[str, ...]
    """Keys that the list may have."""
    role: str
    text: str
    """Keys of a turn's speaker and text."""


class Instructions(NamedTuple):
    """Shape of a record with a question and an answer; `system` may be added."""

    question: str
    answers: tuple[str, ...]
    """Keys that the answer may have; a record has one of them."""
    more: tuple[str, ...] = ()
    """Keys of texts that follow the question."""
    lists: bool = False
    """True if question and answer may be lists of messages, with the record's `tools`."""


TURNS = Turns(("messages", "conversations"), "role", "content")
FORMATS: dict[ChatFormat, Turns | Instructions] = {
    "sharegpt": Turns(("conversations",), "from", "value"),
    "messages": TURNS,
    "alpaca": Instructions("instruction", ("output", "response"), more=("input",)),
    "prompt": Instructions("prompt", ("completion", "response"), lists=True),
}
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text, in OpenAI's two interfaces."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer's thoughts, for templates that read them."""
EXTRA: dict[str, tuple[str, ...]] = {
    "system": ("name",),
    "user": ("name",),
    "assistant": ("name", "tool_calls", *THOUGHTS),
    "tool": ("name", "tool_call_id"),
}
"""Keys of a message besides its text that chat templates read, by its role."""
OTHER_SHAPE = "another shape"
NO_TEXT = "a content that is not text"
WRONG_TOOLS = "wrong tools or calls"
"""Reasons that reports count."""


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

    @property
    def utf8_bytes(self) -> int:
        """Bytes of the text of all messages."""
        size = 0
        for message in self.messages:
            size += utf8_size(message.content) + utf8_size(message.extra)
        return size


def read_chats(
    source: str,
    chat_format: ChatFormat,
    *,
    split: str,
    malformed: Malformed,
    weight_field: str = "",
    encodings: Sequence[str] = UTF_8,
    max_bytes: int | None = None,
) -> Iterator[Conversation]:
    """Read the conversations of `source`, and report unreadable records to `malformed`.

    Columns of a table that no format has are not read, unless it has no others.

    Args:
      max_bytes: most bytes of a conversation, and of a record (`read_rows`); None: no limit.

    Raises:
      ValueError: for an unknown format, or a conversation beyond the limit.
    """
    if chat_format not in FORMATS:
        raise ValueError(f"unknown chat format {chat_format!r}; known: {', '.join(FORMATS)}")
    only = (*_keys(), *filter(None, [weight_field]))
    rows = read_rows(source, split=split, malformed=malformed, only=only, encodings=encodings, max_bytes=max_bytes)
    for record, name in rows:
        try:
            messages = read_messages(record, chat_format)
            weight = weight_of(record, weight_field)
        except MalformedRecord as fault:
            unreadable = record if fault.reason == OTHER_SHAPE else None
            malformed(f"{name}: {fault}", fault.reason, unreadable)
            continue
        conversation = Conversation(messages, name, weight)
        check_size(name, conversation.utf8_bytes, max_bytes)
        yield conversation


def _keys() -> list[str]:
    """Return the keys that records of conversations have, in any format."""
    keys = ["system", "tools", "functions", "history"]
    for shape in FORMATS.values():
        if isinstance(shape, Turns):
            keys += shape.turns
        else:
            keys += [shape.question, *shape.answers, *shape.more]
    return keys


def formats_of(record: dict[str, Any]) -> list[ChatFormat]:
    """Return the formats that read a record as a conversation with at least one message."""
    readable: list[ChatFormat] = []
    for chat_format in FORMATS:
        with suppress(MalformedRecord):
            if read_messages(record, chat_format):
                readable.append(chat_format)
    return readable


def read_messages(record: dict[str, Any], chat_format: ChatFormat) -> tuple[Message, ...]:
    """Return the messages of a record. Raises MalformedRecord for a record of another shape."""
    shape = FORMATS[chat_format]
    if isinstance(shape, Instructions):
        return _messages(_instruction(record, shape), record if shape.lists else {}, TURNS)
    turns = record.get(_given_key(record, shape.turns, "one of them"))
    if not isinstance(turns, list):
        names = " or ".join(map(repr, shape.turns))
        raise MalformedRecord(f"no list {names}; it has: {', '.join(record) or 'nothing'}", OTHER_SHAPE)
    messages = _messages(turns, record, shape)
    if not record.get("system"):
        return messages
    system = _message({shape.role: "system", shape.text: record["system"]}, "'system'", shape)
    if any(message.role == "system" for message in messages):
        raise MalformedRecord("it has a 'system' and a turn of the system: keep one of them", OTHER_SHAPE)
    first_turn = int(bool(messages) and messages[0].role == "tools")
    return (*messages[:first_turn], system, *messages[first_turn:])


def _given_key(record: dict[str, Any], keys: Sequence[str], keep: str) -> str:
    """Return the one of the keys that has a value, else one that the record has, empty, else the first.

    Raises MalformedRecord, with what to keep, if several have a value.
    """
    given = [key for key in keys if record.get(key)]
    if len(given) > 1:
        raise MalformedRecord(f"it has {' and '.join(map(repr, given))}: keep {keep}", OTHER_SHAPE)
    empty = [key for key in keys if record.get(key) is not None]
    return [*given, *empty, keys[0]][0]


def _instruction(record: dict[str, Any], shape: Instructions) -> list[Any]:
    """Return the turns of a record with a question and an answer. Either may be a list of messages, of which the
    question's are not trained on."""
    answer_key = _given_key(record, shape.answers, "the one that is the answer")
    needed = {shape.question: repr(shape.question), answer_key: " or ".join(map(repr, shape.answers))}
    values: dict[str, Any] = {}
    for key in ("system", shape.question, *shape.more, answer_key):
        value = record.get(key) or ""
        may_be_list = shape.lists and key in needed
        if type(value) is not str and not (type(value) is list and may_be_list):
            raise MalformedRecord(f"{key!r} is {type(value).__name__}, not text", OTHER_SHAPE)
        if not value and key in needed:
            raise MalformedRecord(f"no {needed[key]}; it has: {', '.join(record) or 'nothing'}", OTHER_SHAPE)
        values[key] = value
    turns: list[Any] = []
    if values["system"]:
        turns.append({"role": "system", "content": values["system"]})
    turns += _history(record)
    question = values[shape.question]
    if isinstance(question, str):
        more = [values[key] for key in shape.more]
        turns.append({"role": "user", "content": "\n\n".join(filter(None, [question, *more]))})
    else:
        turns += map(_untrained, question)
    answer = values[answer_key]
    if isinstance(answer, str):
        turns.append({"role": "assistant", "content": answer})
    else:
        turns += answer
    return turns


def _history(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the turns of earlier pairs of question and answer."""
    turns = []
    pairs = record.get("history") or []
    if not isinstance(pairs, list):
        pairs = [pairs]
    for pair in pairs:
        if not isinstance(pair, list) or list(map(type, pair)) != [str, str]:
            raise MalformedRecord("its 'history' is not a list of [question, answer] pairs", OTHER_SHAPE)
        question, answer = pair
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _untrained(turn: Any) -> Any:
    """Return a turn with weight 0 if it is an answer."""
    if isinstance(turn, dict) and turn.get("role") == "assistant":
        return turn | {"weight": 0}
    return turn


def _messages(turns: list[Any], record: dict[str, Any], shape: Turns) -> tuple[Message, ...]:
    if record.get("functions"):
        raise MalformedRecord("it has 'functions', OpenAI's old form: write them as tools", WRONG_TOOLS)
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise MalformedRecord(f"its 'tools' are not JSON: {error}", WRONG_TOOLS) from None
    messages = []
    if tools:
        if not isinstance(tools, list):
            raise MalformedRecord(f"its 'tools' are {type(tools).__name__}, not a list", WRONG_TOOLS)
        messages.append(Message("tools", json.dumps(_plain(tools, "its 'tools'"))))
    for i, turn in enumerate(turns):
        messages.append(_message(turn, f"turn {i}", shape))
    return tuple(messages)


def _message(turn: Any, name: str, shape: Turns) -> Message:
    """Return the message of a turn; errors call it `name`."""
    calls = isinstance(turn, dict) and bool(turn.get("tool_calls"))
    if not isinstance(turn, dict) or shape.role not in turn or not (shape.text in turn or calls):
        raise MalformedRecord(f"{name} is not an object with {shape.role!r} and {shape.text!r}", OTHER_SHAPE)
    if turn.get("function_call"):
        raise MalformedRecord(f"{name} has a function_call, OpenAI's old form: write it as tool_calls", WRONG_TOOLS)
    if turn.get("refusal"):
        raise MalformedRecord(f"{name} has a 'refusal' beside its {shape.text!r}: make it the text", NO_TEXT)
    role: Any = turn[shape.role]
    keys: tuple[str, ...] = ()
    if type(role) is str and role in ROLES:
        keys = EXTRA[ROLES[role]]
    extra = _extra(turn, keys, name)
    text: Any = _joined(turn.get(shape.text), name)
    if text is None and "tool_calls" in extra:
        text = ""
    for key, value in ((shape.role, role), (shape.text, text)):
        if type(value) is not str:
            raise MalformedRecord(f"the {key!r} of {name} is {type(value).__name__}, not text", NO_TEXT)
    if role not in ROLES:
        raise MalformedRecord(f"{name} is by {reprlib.repr(role)}; known: {', '.join(ROLES)}", "an unknown role")
    try:
        utf8_size(text)
    except UnicodeEncodeError as error:
        raise MalformedRecord(f"{name} cannot be written as UTF-8: {error}", "not valid Unicode") from None
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise MalformedRecord(
            f"the 'weight' of {name} is {reprlib.repr(weight)}; it must be 0 or 1", "a message with a wrong weight"
        )
    extra_json = json.dumps(extra) if extra else ""
    return Message(ROLES[role], text, extra_json, weight != 0)


def _joined(content: Any, name: str) -> Any:
    """Return the text of a content that is a list of parts, one after the other, as chat templates write it; return
    other contents as they are."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind not in TEXT_PARTS or type(part.get("text")) is not str:
            raise MalformedRecord(f"{name} has a part of type {reprlib.repr(kind)}; only text can be read", NO_TEXT)
        texts.append(part["text"])
    if not texts:
        raise MalformedRecord(f"the content of {name} is an empty list", NO_TEXT)
    return "".join(texts)


def _extra(turn: Mapping[str, Any], keys: Sequence[str], name: str) -> dict[str, Any]:
    """Return those of the keys of a turn that have a value, with the arguments of calls as objects."""
    extra = {key: _plain(turn[key], f"the {key!r} of {name}") for key in keys if turn.get(key)}
    for key in ("name", *THOUGHTS):
        if type(extra.get(key, "")) is not str:
            raise MalformedRecord(f"the {key!r} of {name} is {type(extra[key]).__name__}, not text", NO_TEXT)
    calls = extra.get("tool_calls", [])
    if not isinstance(calls, list):
        raise MalformedRecord(f"the 'tool_calls' of {name} are {type(calls).__name__}, not a list", WRONG_TOOLS)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or type(function.get("name")) is not str:
            raise MalformedRecord(f"a call of {name} has no function with a name", WRONG_TOOLS)
        arguments = function.get("arguments")
        if type(arguments) is str:  # OpenAI writes JSON text, templates read objects
            try:
                function["arguments"] = parse_json(arguments)
            except ValueError as error:
                raise MalformedRecord(
                    f"the arguments of {function['name']} in {name} are not JSON: {error}", WRONG_TOOLS
                ) from None
    return extra


def _plain(value: Any, name: str) -> Any:
    """Return a JSON value without nulls. Raises MalformedRecord, which calls it `name`, if it has too many levels."""
    try:
        check_levels(value)
    except ValueError as error:
        raise MalformedRecord(f"{name} cannot be read: {error}", WRONG_TOOLS) from None
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys that have no value: tables give every object the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    return value
