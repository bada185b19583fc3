"""An untrusted chat template in Jinja's sandbox, which restricts it to its inputs.

Names of special tokens in the messages are broken up before the template runs and restored afterwards, so that only
the special tokens that the template itself writes become control tokens.

`template_worker.py` imports this file in a process that has only the standard library and jinja2.
"""

import json
import os
import re
import secrets
from typing import Any

TOO_MUCH_OUTPUT = 4
"""Exit code of the process if a template writes too much."""

_NONCE = secrets.token_hex(8)
BREAK, START, STOP = (f"\ufdd0{_NONCE}{letter}\ufdd1" for letter in "bse")
"""Marks that no message contains: a break within a special token's name, and the begin and end of a `generation`
block."""


class Refused(Exception):
    """Error in a template, or in its rendering of a conversation."""


def make_sandbox(chat_date: str | None) -> Any:
    """Make Jinja's sandbox with the functions that transformers provides, for which templates are written."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Block `{% generation %}...{% endgeneration %}`, which puts marks around its content."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller):
            return START + caller() + STOP

    def raise_exception(message):
        raise TemplateError(message)

    def strftime_now(format):
        date = datetime.fromisoformat(chat_date) if chat_date else datetime.now()
        return date.strftime(format)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    sandbox.filters["tojson"] = tojson
    del sandbox.filters["random"]
    return sandbox


class ChatTemplate:
    """A compiled template. Its methods raise any error of the template.

    Args:
      source: the template.
      values: variables of the template, such as bos_token.
      controls: names of the tokenizer's control tokens.
      chat_date: see `load_template`.
      options: variables that the user sets; the template must read each of them.
      output: number of characters that the template may write in addition to those of the messages.
    """

    def __init__(
        self,
        source: str,
        values: dict[str, str],
        controls: list[str],
        chat_date: str | None,
        output: int,
        options: dict[str, Any] | None = None,
    ):
        from jinja2 import meta, nodes

        sandbox = make_sandbox(chat_date)
        tree = sandbox.parse(source)
        asked = {name.name for name in tree.find_all(nodes.Name)}
        if "lipsum" in asked and chat_date is not None:
            raise Refused("it makes random text (lipsum)")
        if "strftime_now" in asked and chat_date == "":
            raise Refused(
                "it asks for the date (strftime_now), so that a conversation would become other tokens tomorrow; fix "
                "the date with --chat_date=2024-07-26, or data.chat_date in a config"
            )
        read = meta.find_undeclared_variables(tree)
        for name in options or ():
            if name not in read:
                free = ", ".join(sorted(read - {"messages", "tools", "add_generation_prompt", "strftime_now", *values}))
                raise Refused(f"it does not read template_option {name}; the names that it reads are {free or 'none'}")
        self._template = sandbox.from_string(tree)
        self._values = values | (options or {})
        self._controls = controls
        names = sorted(controls, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self._output = output
        self.tools: list[Any] | None = None
        """Functions that the conversation at hand may call."""

    def prompt(self, conversation: list[list[Any]]) -> list[tuple[str, bool, bool]]:
        """Render a conversation up to the answer that comes next, as (text, False, is a control token)."""
        text = self.render(self.read(conversation), add_generation_prompt=True)
        return self.at_controls([(without_marks(text), False)])

    def text(self, conversation: list[list[Any]]) -> list[tuple[str, bool, bool]]:
        """Render a conversation whose answers need not be found; the result is as that of `prompt`."""
        return self.at_controls([(without_marks(self.render(self.read(conversation))), False)])

    def read(self, conversation: list[list[Any]]) -> list[dict[str, Any]]:
        """Return the messages of a conversation as templates read them, and keep its tools for `render`."""
        tools = None
        turns: list[dict[str, Any]] = []
        for role, text, extra, *_ in conversation:
            if role == "tools" and not turns:
                tools = json.loads(text)
            else:
                turns.append({"role": role, "content": text} | json.loads(extra or "{}"))
        self.tools = self._broken(tools)
        return self._broken(turns)

    def at_controls(self, pieces: list[tuple[str, bool]]) -> list[tuple[str, bool, bool]]:
        """Split pieces (text, is trained on) at the names of control tokens, into (..., is a control token)."""
        parts = []
        for piece, trained in pieces:
            for i, part in enumerate(self._split(piece)):
                is_control = bool(i % 2)
                if is_control:
                    parts.append((part, trained, True))
                elif part:
                    parts.append((part.replace(BREAK, ""), trained, False))
        return parts

    def controls_in(self, text: str) -> list[str]:
        """Return the control tokens in a text."""
        return self._split(text)[1::2]

    def _split(self, text: str) -> list[str]:
        """Split a text into other text and control tokens, alternately."""
        return self._control.split(text) if self._controls else [text]

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Render messages that `read` returned, with START and STOP around the template's `generation` blocks."""
        values = {"messages": messages, "tools": self.tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(**values, **self._values)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise Refused(f"refuses this: {describe(error)}") from None
        if not text.isascii():
            text.encode()
        if len(text) > self._output + sum(map(size_of, (*messages, self.tools))):
            os._exit(TOO_MUCH_OUTPUT)
        return text

    def _broken(self, value):
        """Insert a BREAK in every name of a special token, in a text or in the texts of a JSON value."""
        if isinstance(value, dict):
            return {self._broken(key): self._broken(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(map(self._broken, value))
        if isinstance(value, str):
            for name in self._controls:
                value = value.replace(name, name[0] + BREAK + name[1:])
        return value


def without_marks(text: str) -> str:
    """Return a rendered text without START and STOP."""
    return re.sub(f"{START}|{STOP}", "", text)


def size_of(value: Any) -> int:
    """Return the characters of a JSON value's texts."""
    if isinstance(value, dict):
        return sum(size_of(item) for key, item in value.items() if key != "role")
    if isinstance(value, list):
        return sum(map(size_of, value))
    if isinstance(value, str):
        return len(value)
    return 0


def describe(error: Exception) -> str:
    """Return the message of an error, preceded by the error's type unless the template chose the message."""
    from jinja2 import TemplateError

    words = str(error)
    if not isinstance(error, TemplateError | Refused):
        words = f"{type(error).__name__}: {words}"
    return words[:1000]
