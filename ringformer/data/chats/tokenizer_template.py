"""The chat template of a tokenizer: jinja2 in a sandbox, and where in its output the answers are.

A template that marks answers with `{% generation %}` is believed. Of any other, the answer to a question is what the
template adds to the conversation up to the question, generation prompt included; where that is not simply added at the
end, or does not begin with the answer, or no token ends it, ValueError says so.

Names of special tokens in the messages themselves are broken up before the template runs and made whole after it, so
that only the template's own become control tokens.

A template is a stranger's program. The sandbox of jinja2 keeps it to the conversation, the names of its tokens and the
date, and its loops and calls are counted, so that it ends. How much memory it takes on the way is not limited.
"""

import importlib.metadata
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ringformer.data.chats.conversations import Message
from ringformer.data.tokenizers.base import Segment, Tokenizer

_NONCE = secrets.token_hex(8)
BREAK, START, STOP = (f"\ufdd0{_NONCE}{letter}\ufdd1" for letter in "bse")
"""Text that no message contains: parts a special token's name; begins and ends a `generation` block."""

SAFE_VERSION = (3, 1, 6)
"""The first safe version of jinja2: before it a template could leave the sandbox by `attr` (CVE-2025-27516)."""

MOST_STEPS = 1_000_000
"""Loop iterations and calls of one rendering."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which keeps a template from what it is not given; here also from running for ever."""

    def __init__(self, chat_date: str | None):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self._chat_date = chat_date
        self.globals.update(raise_exception=_raise, strftime_now=lambda format: self._now().strftime(format))
        del self.filters["random"]
        # With the context a filter is not evaluated when the template is compiled.
        self.filters |= {"tojson": _tojson, "counted": pass_context(lambda _, items: self._counted(items))}
        self.steps = 0

    def compile_counted(self, source: str) -> Template:
        """The template of a source, its loops counted."""
        tree = self.parse(source)
        asked = {name.name for name in tree.find_all(nodes.Name)}
        if "lipsum" in asked and self._chat_date is not None:
            raise TemplateError("it makes random text (lipsum)")
        if "strftime_now" in asked and self._chat_date == "":
            raise TemplateError(
                "it asks for the day (strftime_now), so that a conversation would become other tokens tomorrow; say "
                "which day it is to take for today: --chat_date=2024-07-26, in a config data.chat_date"
            )
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno, environment=self)
        return self.from_string(tree)

    def _now(self) -> datetime:
        return datetime.fromisoformat(self._chat_date) if self._chat_date else datetime.now()

    def call(self, context, obj, /, *args, **kwargs):  # a template may name an argument `context`
        self._step()
        if isinstance(obj, LoopContext) and args:  # a recursive loop
            args = (self._counted(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def _counted(self, items):
        for item in items:
            self._step()
            yield item

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TemplateError(f"it takes more than {MOST_STEPS:,} steps")


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: puts marks around what it holds."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return START + caller() + STOP


def jinja_template(tokenizer: Tokenizer, chat_date: str | None) -> Callable[[Sequence[Message]], list[Segment]]:
    """The chat template of `tokenizer`; for `chat_date` see `load_template`.

    Raises ValueError if it has none, it cannot be compiled, or the installed jinja2 has no safe sandbox.
    """
    _check_version()
    source, sandbox = _source(tokenizer), Sandbox(chat_date)
    try:
        template = sandbox.compile_counted(source)
    except (TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template of tokenizer {tokenizer.name} cannot be used: {error}") from None
    names = {key: _name(value) for key, value in tokenizer.config.items() if key.endswith("_token")}
    for key, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if names.get(key) is None:
            names[key] = next((name for name, i in tokenizer.controls.items() if i == token), "")
    names = {key: name for key, name in names.items() if name is not None}

    def run(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        values = [{"role": role, "content": _broken(content, tokenizer)} for role, content in messages]
        sandbox.steps = 0
        try:
            return template.render(messages=values, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:  # it is a program: anything may be wrong with it
            what = error if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template of tokenizer {tokenizer.name} refuses this: {what}") from None

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


def _by_prefixes(
    text: str, run: Callable[..., str], messages: Sequence[Message], tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """Pieces of the rendered conversation, (text, trained): an answer is what the template adds after its question."""
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
        added_at_end = after.startswith(before) and after.startswith(answer, start)
        ends = not rest or rest.startswith(tuple(tokenizer.controls))
        if not (added_at_end and ends and text.startswith(after)):
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
    """The begin and the end of each run of trained segments."""
    flags = [False, *(s.trained for s in segments), False]
    edges = [i for i in range(len(flags) - 1) if flags[i] != flags[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _broken(content: str, tokenizer: Tokenizer) -> str:
    """The text with a BREAK in every name of a special token."""
    for name in tokenizer.controls:
        content = content.replace(name, name[0] + BREAK + name[1:])
    return content


def _source(tokenizer: Tokenizer) -> str:
    """The template's source text. Raises ValueError if the tokenizer has none."""
    source: Any = tokenizer.config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not source or type(source) is not str:
        raise ValueError(
            f"tokenizer {tokenizer.name} has no chat template: it needs a tokenizer_config.json with a chat_template "
            "beside it; or choose another template"
        )
    return source


def _check_version() -> None:
    installed = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < SAFE_VERSION:
        safe = ".".join(map(str, SAFE_VERSION))
        raise ValueError(f"jinja2 {installed} lets a tokenizer's chat template read files and the environment of this "
                         f"process: pip install -U 'jinja2>={safe}'")  # fmt: skip


def _name(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
