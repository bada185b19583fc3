"""Conversations: ShareGPT records and OpenAI messages, read from JSON, JSON lines, parquet or datasets.

sharegpt   {"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
messages   {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
"""

import reprlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ringformer.data.sources import Malformed, read_rows

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}
ChatFormat = Literal["sharegpt", "messages"]
FORMATS: dict[ChatFormat, tuple[str, str, str]] = {
    "sharegpt": ("conversations", "from", "value"),
    "messages": ("messages", "role", "content"),
}
"""Keys of a record's turns, and of a turn's speaker and text."""


class Message(NamedTuple):
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


class Conversation(NamedTuple):
    """The turns of a record, and its name in errors: a path and line."""

    messages: tuple[Message, ...]
    name: str


def read_chats(source: str, chat_format: ChatFormat, *, split: str, malformed: Malformed) -> Iterator[Conversation]:
    """Read the conversations of `source`, and report unreadable records to `malformed`.

    Raises:
      ValueError: for an unknown format.
    """
    if chat_format not in FORMATS:
        raise ValueError(f"unknown chat format {chat_format!r}; known: {', '.join(FORMATS)}")
    for record, name in read_rows(source, split=split, malformed=malformed):
        try:
            messages = _messages(record, *FORMATS[chat_format])
        except ValueError as error:
            malformed(f"{name}: {error}")
            continue
        yield Conversation(messages, name)


def _messages(record: dict[str, Any], turns_key: str, role_key: str, text_key: str) -> tuple[Message, ...]:
    turns = record.get(turns_key)
    if not isinstance(turns, list):
        raise ValueError(f"no list {turns_key!r}; it has: {', '.join(record) or 'nothing'}")
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or role_key not in turn or text_key not in turn:
            raise ValueError(f"turn {i} is not an object with {role_key!r} and {text_key!r}")
        for key in (role_key, text_key):
            if type(turn[key]) is not str:
                raise ValueError(f"the {key!r} of turn {i} is {type(turn[key]).__name__}, not text")
        role, text = turn[role_key], turn[text_key]
        if role not in ROLES:
            raise ValueError(f"turn {i} is by {reprlib.repr(role)}; known: {', '.join(ROLES)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"turn {i} cannot be written as UTF-8: {error}") from None
        messages.append(Message(ROLES[role], text))
    return tuple(messages)
