"""The process in which a stranger's chat template runs: a script, not imported, of the standard library and jinja2.

A template is a program. Jinja's sandbox keeps it to what it is given; the kernel keeps this process to its limits of
time and memory, and ends it where the template goes over. stdin and stdout carry frames: 8 bytes of length, then JSON.

    in   {"path": sys.path, "source": ..., "values": ..., "controls": [names], "chat_date": ...,
          "seconds": CPU time to compile and for a conversation, "memory": bytes above those of the start,
          "output": characters besides those of the messages}
    out  "" when it is compiled, or what is wrong
    in   [[[role, content], ...], ...]   conversations
    out  for each of them [[text, trained on, is it a control token], ...], or {"error": ...}

A template that marks answers with `{% generation %}` is believed. Of any other, the answer to a question is what the
template adds to the conversation up to the question, generation prompt included; where that is not simply added at the
end, or does not begin with the answer, or no token ends it, the error says so.

Names of special tokens in the messages themselves are broken up before the template runs and made whole after it, so
that only the template's own become control tokens.
"""

import json
import os
import re
import resource
import secrets
import select
import signal
import struct
import sys

TOO_MUCH_MEMORY, TOO_MUCH_OUTPUT = 3, 4
"""Exit codes. Too much time is SIGPROF."""
LENGTH = struct.Struct(">Q")
ROOM = 32
"""Bytes of memory that a byte of a frame may need besides the template's: it is read, broken up, said and written."""

_NONCE = secrets.token_hex(8)
BREAK, START, STOP = (f"\ufdd0{_NONCE}{letter}\ufdd1" for letter in "bse")
"""Text that no message contains: parts a special token's name; begins and ends a `generation` block."""


class Refused(Exception):
    """What is wrong with a template, or with what it makes of a conversation."""


def make_sandbox(chat_date: str | None):
    """Jinja's sandbox with what transformers gives a template, which is what templates are written for."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: puts marks around what it holds."""

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
        return (datetime.fromisoformat(chat_date) if chat_date else datetime.now()).strftime(format)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    sandbox.filters["tojson"] = tojson
    del sandbox.filters["random"]
    return sandbox


class ChatTemplate:
    """A template, and what it makes of conversations. Its methods raise whatever the template does."""

    def __init__(self, source: str, values: dict[str, str], controls: list[str], chat_date: str | None, output: int):
        from jinja2 import nodes

        sandbox = make_sandbox(chat_date)
        tree = sandbox.parse(source)
        asked = {name.name for name in tree.find_all(nodes.Name)}
        if "lipsum" in asked and chat_date is not None:
            raise Refused("it makes random text (lipsum)")
        if "strftime_now" in asked and chat_date == "":
            raise Refused(
                "it asks for the day (strftime_now), so that a conversation would become other tokens tomorrow; say "
                "which day it is to take for today: --chat_date=2024-07-26, in a config data.chat_date"
            )
        self._template = sandbox.from_string(tree)
        self._values = values
        self._controls = controls
        names = sorted(controls, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")").split if names else lambda text: [text]
        self._output = output

    def segments(self, messages: list[tuple[str, str]]) -> list[tuple[str, bool, bool]]:
        """The conversation as (text, trained on, is it a control token)."""
        messages = [(role, self._broken(content)) for role, content in messages]
        text = self._run(messages)
        if not text.isascii():
            text.encode()
        answers = sum(role == "assistant" for role, _ in messages)
        if START in text:
            if text.count(START) != answers:
                raise Refused(
                    f"has {text.count(START)} generation blocks for {answers} answers: it must mark each once"
                )
            marks = re.split(f"({START}|{STOP})", text)
            pieces = list(zip(marks[::2], [False, *(mark == START for mark in marks[1::2])], strict=True))
        else:
            pieces = self._by_prefixes(text, messages)
        return [
            (part if i % 2 else part.replace(BREAK, ""), trained, bool(i % 2))
            for piece, trained in pieces
            for i, part in enumerate(self._split(piece))
            if part
        ]

    def _run(self, messages: list[tuple[str, str]], add_generation_prompt: bool = False) -> str:
        said = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._template.render(messages=said, add_generation_prompt=add_generation_prompt, **self._values)
        except MemoryError:
            raise
        except Exception as error:  # it is a program: anything may be wrong with it
            raise Refused(f"refuses this: {describe(error)}") from None
        if len(text) > self._output + sum(len(content) for _, content in messages):
            os._exit(TOO_MUCH_OUTPUT)
        return text

    def _broken(self, content: str) -> str:
        """The text with a BREAK in every name of a special token."""
        for name in self._controls:
            content = content.replace(name, name[0] + BREAK + name[1:])
        return content

    def _by_prefixes(self, text: str, messages: list[tuple[str, str]]) -> list[tuple[str, bool]]:
        """Pieces of the conversation, (text, trained): an answer is what the template adds after its question."""
        pieces, place = [], 0
        for i, (role, answer) in enumerate(messages):
            if role != "assistant":
                continue
            before, after = self._run(messages[:i], add_generation_prompt=True), self._run(messages[: i + 1])
            start, added = len(before), after[len(before) :]
            if not added.startswith(answer):  # spaces may stand before it, and be taken off it
                answer, start = answer.strip(), len(after) - len(added.lstrip())
            rest = after[start + len(answer) :].lstrip()
            added_at_end = after.startswith(before) and after.startswith(answer, start)
            ends = not rest or rest.startswith(tuple(self._controls))
            if not (added_at_end and ends and text.startswith(after)):
                raise Refused(
                    f"rewrites earlier text or answer {i}, so that answers cannot be found in it: mark them in it with "
                    "{% generation %} and {% endgeneration %}, or choose another template"
                )
            pieces += [(text[place:start], False), (text[start : len(after)], True)]
            place = len(after)
        return [*pieces, (text[place:], False)]


def describe(error: Exception) -> str:
    """What a template's error says, or its kind, too, where the template did not choose the words."""
    from jinja2 import TemplateError

    words = str(error) if isinstance(error, TemplateError | Refused) else f"{type(error).__name__}: {error}"
    return words[:1000]


def limit_memory(most: int) -> None:
    """Let the process have so many bytes of address space, where the kernel counts it (Linux)."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def address_space() -> int:
    """The bytes of address space that the process has; 0 where it is not limited."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def encode(value) -> bytes:
    """JSON, of any text that JSON may hold: half of a surrogate pair, too."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode(content: bytes):
    """The value that `encode` was given. Raises ValueError, or RecursionError, for what it did not make."""
    return json.loads(content.decode("utf-8", "surrogatepass"))


def read_frame(parent: int, limits: tuple[int, int] | None = None):
    """The next value from stdin; ends the process where there is none, or the parent is gone.

    Another process may hold the other end of the pipe, so that its end alone does not tell."""
    while not select.select([sys.stdin.buffer], [], [], 2.0)[0]:
        if os.getppid() != parent:
            sys.exit()
    header = sys.stdin.buffer.read(LENGTH.size)
    if len(header) < LENGTH.size:
        sys.exit()
    (size,) = LENGTH.unpack(header)
    if limits is not None:
        limit_memory(sum(limits) + ROOM * size)
    return decode(sys.stdin.buffer.read(size))


def write_frame(value) -> None:
    """Say a value, now: what is in a buffer dies with the process."""
    content = encode(value)
    sys.stdout.buffer.write(LENGTH.pack(len(content)) + content)
    sys.stdout.buffer.flush()


def attempt(seconds: float, work, *args):
    """What `work` gives, or {"error": ...}; the process ends if that takes more time or memory than it has."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return work(*args)
    except MemoryError:
        os._exit(TOO_MUCH_MEMORY)
    except Exception as error:
        return {"error": describe(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    parent = os.getppid()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    told = read_frame(parent)
    sys.path[:] = told["path"]  # the jinja2 that the parent has
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  (before memory is counted)

    limits = address_space(), told["memory"]
    limit_memory(sum(limits))
    given = {key: told[key] for key in ("source", "values", "controls", "chat_date", "output")}
    template = attempt(told["seconds"], lambda: ChatTemplate(**given))
    if isinstance(template, dict):
        write_frame(template["error"])
        return
    write_frame("")
    while True:
        for messages in read_frame(parent, limits):
            write_frame(attempt(told["seconds"], template.segments, messages))


if __name__ == "__main__":
    main()
