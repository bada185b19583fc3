"""The chat template of a tokenizer: jinja2 in a sandbox, and where in its output the answers are.

A template that marks answers with `{% generation %}` is believed. Of any other, the answer to a question is what the
template adds to the conversation up to the question, generation prompt included; where that is not simply added at the
end, or does not begin with the answer, or no token ends it, ValueError says so.

Names of special tokens in the messages themselves are broken up before the template runs and made whole after it, so
that only the template's own become control tokens.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ringformer.data.chat import Message
from ringformer.data.tokenizers import Segment, Tokenizer

_NONCE = secrets.token_hex(8)
BREAK, START, STOP = (f"\ufdd0{_NONCE}{letter}\ufdd1" for letter in "bse")
"""Text that no message contains: parts a special token's name; begins and ends a `generation` block."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: puts marks around what it holds."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return START + caller() + STOP


def jinja_template(tokenizer: Tokenizer) -> Callable[[Sequence[Message]], list[Segment]]:
    """The chat template of `tokenizer`. Raises ValueError if it has none, or it cannot be compiled."""
    source = _source(tokenizer)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    environment.filters["tojson"] = _tojson
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template of tokenizer {tokenizer.name} cannot be read: {error}") from None
    names = {key: _name(value) for key, value in tokenizer.config.items() if key.endswith("_token")}
    for key, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if names.get(key) is None:
            names[key] = next((name for name, i in tokenizer.controls.items() if i == token), "")
    names = {key: name for key, name in names.items() if name is not None}

    def run(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        values = [{"role": role, "content": _broken(content, tokenizer)} for role, content in messages]
        try:
            return template.render(messages=values, add_generation_prompt=add_generation_prompt, **names)
        except TemplateError as error:
            raise ValueError(f"the chat template of tokenizer {tokenizer.name} refuses this: {error}") from None

    def render(messages: Sequence[Message]) -> list[Segment]:
        text = run(messages)
        if START in text:
            marks = re.split(f"({START}|{STOP})", text)
            pieces = list(zip(marks[::2], [False, *(mark == START for mark in marks[1::2])], strict=True))
            answers = sum(message.role == "assistant" for message in messages)
            if text.count(START) != answers:
                raise ValueError(f"{text.count(START)} generation blocks for {answers} answers: the chat template "
                                 "must mark each answer once")  # fmt: skip
        else:
            pieces = _by_prefixes(text, run, messages, tokenizer)
        segments = [s for piece, trained in pieces for s in _segments(piece, trained, tokenizer)]
        return _with_end_tokens(segments, messages, tokenizer)

    return render


def _by_prefixes(text: str, run, messages: Sequence[Message], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    pieces, place = [], 0
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before, after = run(messages[:i], add_generation_prompt=True), run(messages[: i + 1])
        answer, added = _broken(message.content, tokenizer), after[len(before) :]
        start = len(before)
        if not added.startswith(answer):  # spaces may stand before it, and be taken off it
            answer, start = answer.strip(), len(after) - len(added.lstrip())
        rest = after[start + len(answer) :].lstrip()
        found = after.startswith(before) and after.startswith(answer, start)
        found = found and (not rest or rest.startswith(tuple(tokenizer.controls)))
        if not (found and text.startswith(after)):
            raise ValueError(
                f"the chat template of tokenizer {tokenizer.name} rewrites earlier text or answer {i}, so that answers "
                "cannot be found in it: mark them in it with {% generation %} and {% endgeneration %}, or choose "
                "another template"
            )
        pieces += [(text[place:start], False), (text[start : len(after)], True)]
        place = len(after)
    return [*pieces, (text[place:], False)]


def _segments(text: str, trained: bool, tokenizer: Tokenizer) -> list[Segment]:
    """Text cut at the template's special tokens, the messages' own made whole again."""
    names = sorted(tokenizer.controls, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return [
        Segment(part, trained, tokenizer.controls[part]) if i % 2 else Segment(part.replace(BREAK, ""), trained)
        for i, part in enumerate(parts)
        if part
    ]


def _with_end_tokens(segments: list[Segment], messages: Sequence[Message], tokenizer: Tokenizer) -> list[Segment]:
    """Every answer trained up to the control token that ends it, and no further."""
    runs, answers = _runs(segments), sum(message.role == "assistant" for message in messages)
    if len(runs) != answers or not runs:
        raise ValueError(f"the chat template of tokenizer {tokenizer.name} shows {len(runs)} of {answers} answers; "
                         "choose another template")  # fmt: skip
    first, last = runs[-1]
    # The token that ends a turn is known from the last answer: after it, nothing else can come.
    inside = [s for s in segments[first:last] if s.control is not None]
    end = inside[-1] if inside else next(iter(segments[last:]), None)
    if end is None or end.control is None:
        raise ValueError(f"in the chat template of tokenizer {tokenizer.name} no control token ends the last answer; "
                         "choose another template")  # fmt: skip
    segments = list(segments)
    for first, last in runs:
        places = [i for i in range(first, last) if segments[i].control == end.control]
        if not places and last < len(segments) and segments[last].control == end.control:
            places = [last]
        if not places:
            raise ValueError(f"in the chat template of tokenizer {tokenizer.name} an answer does not end with "
                             f"{end.text}, as the last one does; choose another template")  # fmt: skip
        for i in range(first, max(last, places[-1] + 1)):
            segments[i] = segments[i]._replace(trained=i <= places[-1])
    return segments


def _runs(segments: list[Segment]) -> list[tuple[int, int]]:
    """Where consecutive trained segments begin and end."""
    flags = [False, *(s.trained for s in segments), False]
    edges = [i for i in range(len(flags) - 1) if flags[i] != flags[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _broken(content: str, tokenizer: Tokenizer) -> str:
    for name in tokenizer.controls:
        content = content.replace(name, name[0] + BREAK + name[1:])
    return content


def _source(tokenizer: Tokenizer) -> str:
    source: Any = tokenizer.config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = next((item["template"] for item in source if item["name"] == "default"), None)
    if not source:
        raise ValueError(
            f"tokenizer {tokenizer.name} has no chat template: it needs a tokenizer_config.json with a chat_template "
            "beside it; or choose another template"
        )
    return source


def _name(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
