"""The parts of a conversation that a chat template leaves out: a model would learn to answer without them.

Templates strip and indent texts, write values as JSON, and take thoughts apart. So white space is not compared, and a
text may stand there as in JSON.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SWITCHES = re.compile(r"(?<!\S)/(no_)?think(?!\S)")
"""Words in a message that templates read instead of writing them."""
NOT_WRITTEN = ("type", "id", "tool_call_id")
"""Keys of tools and calls whose values templates replace by words of their own, or need not write."""
EXCERPT = 60
"""Characters of a part that an error shows."""


def part_left_out(
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    introduction: str,
    whole: str,
    shown: Callable[[int], Iterable[str]],
) -> str | None:
    """Return a description of the first part that is not in the text that a template has made; None if all is there.

    Args:
      messages: of the conversation, as templates read them.
      tools: the functions that may be called.
      introduction: the prompt of the first answer, in which the tools stand; later calls have their names too.
      whole: the conversation as text.
      shown: returns texts of an answer in its own turn, given its place in `messages`; one of them has all of it.
    """
    in_prompt = _squeezed(introduction)
    missing = _first_absent(_texts(tools or []), in_prompt)
    if missing is not None:
        return f"{_excerpt(missing)} of the tools"
    squeezed = _squeezed(whole)
    reached = 0
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            missing = _left_out_of_answer(message, shown(number))
        elif role == "system":  # templates move it, and may write it in prompts alone
            missing = _first_absent([message["content"], message.get("name", "")], in_prompt, squeezed)
        else:
            name = message.get("name", "") if role == "user" else ""
            missing = _first_absent([name, message["content"]], squeezed, start=reached)
            reached = _place(message["content"], squeezed, reached) or reached
        if missing is not None:
            return f"{_excerpt(missing)} of turn {number} ({role})"
    return None


def _left_out_of_answer(message: dict[str, Any], texts: Iterable[str]) -> str | None:
    """Return a text of an answer's message that is in none of the renderings, or in none with the others."""
    content = dict(message)
    del content["role"]
    parts = list(_texts(content))
    missing = None
    for rendering in texts:
        missing = _first_absent(parts, _squeezed(rendering))
        if missing is None:
            return None
    return missing


def _first_absent(parts: Iterable[str], *texts: str, start: int = 0) -> str | None:
    """Return the first part that is in none of the texts without white space; None if there is no such part."""
    for part in parts:
        if all(_place(part, text, start) is None for text in texts):
            return part
    return None


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a JSON value that a template has to write: keys that name parameters, and all other values."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("properties", "arguments") and isinstance(item, dict):
                yield from item
            if key not in NOT_WRITTEN:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
    elif not isinstance(value, bool) and value is not None:
        yield json.dumps(value)


def _place(text: str, squeezed: str, start: int = 0) -> int | None:
    """Return the place behind a text, as it is or as in JSON, in a text without white space; None if it is absent."""
    text = SWITCHES.sub("", text)
    for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
        wanted = _squeezed(form)
        place = squeezed.find(wanted, start)
        if place >= 0:
            return place + len(wanted)
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _excerpt(text: str) -> str:
    if len(text) > EXCERPT:
        text = f"{text[:EXCERPT]}..."
    return repr(text)
