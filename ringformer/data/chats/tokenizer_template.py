"""Chat template of a tokenizer: it renders conversations, with the answers to train on, and prompts.

A template is an untrusted program. `template_worker.py` compiles and runs it in a separate process, which is ended if
the template exceeds its limits of time, memory or output. The results are checked and treated as text.
"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from ringformer.data.chats import template_worker
from ringformer.data.chats.conversations import Message
from ringformer.data.chats.rendered import Rendered, checked_segments, checked_sequences
from ringformer.data.chats.sandboxed_template import TOO_MUCH_OUTPUT
from ringformer.data.chats.template_worker import TOO_MUCH_MEMORY
from ringformer.data.tokenizers.base import Segment, Tokenizer, control_name

SAFE_VERSION = (3, 1, 6)
"""First safe version of jinja2: in earlier versions, a template could escape the sandbox through `attr`
(CVE-2025-27516)."""

SECONDS = 2.0
"""Seconds of CPU time that a template may take to compile, and to render one conversation."""
CLOCK = 10.0
"""Wall time that a conversation may take, as a multiple of SECONDS. It is larger because other programs also use the
machine."""
SECONDS_TO_SEND = 2e-6
"""Seconds of wall time to send one character to the process and back."""
MEMORY = 2**30
"""Bytes of address space that the process may use in addition to those that it uses at its start."""
EXIT_SECONDS = 1.0
"""A process whose pipe is closed has this long to end by itself, with the exit code that says why."""
OUTPUT = 1_000_000
"""Characters that a template may write besides the text of the messages."""
START_SECONDS = 60.0
"""Seconds of wall time in which the process must start and import jinja2."""


Result = TypeVar("Result")
Work = Literal["sequences", "prompt", "text"]
"""Renderings: sequences that train on a conversation's answers, the prompt of the next answer, or any conversation."""


class JinjaTemplate:
    """The chat template of `tokenizer`, for batches of conversations.

    It may be called from several threads and, after a fork, from several processes.

    Args:
      chat_date: see `load_template`.
      options: variables of the template.

    Raises:
      ValueError: if the tokenizer has no template, the template cannot be compiled, or jinja2's sandbox is not safe.
    """

    def __init__(self, tokenizer: Tokenizer, chat_date: str | None, options: Mapping[str, Any]):
        _check_version()
        self._tokenizer = tokenizer
        names = {"bos_token": control_name(tokenizer, tokenizer.bos_id)}
        names["eos_token"] = control_name(tokenizer, tokenizer.eos_id)
        for key, name in tokenizer.config.items():
            if key.endswith("_token") and name is not None:
                names[key] = name
        template = {
            "source": _source(tokenizer),
            "values": names,
            "options": options,
            "controls": list(tokenizer.controls),
            "chat_date": chat_date,
            "output": OUTPUT,
        }
        self._setup = {"path": sys.path, "template": template, "seconds": SECONDS, "memory": MEMORY}
        self._lock = threading.Lock()
        self._worker: Worker | None = self._start()

    def __call__(self, conversations: Sequence[Sequence[Message]]) -> list[list[Rendered] | ValueError]:
        """Return the sequences that train on the answers of each conversation, or an error."""
        results: list[list[Rendered] | ValueError] = []
        while len(results) < len(conversations):  # only one pass if the template stays within its limits
            results += self._render("sequences", conversations[len(results) :], checked_sequences)
        return results

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        """Return the segments of a conversation up to the answer that comes next, as transformers renders them with
        `add_generation_prompt`. Raises ValueError if the template refuses the conversation."""
        return self._one("prompt", messages)

    def text(self, messages: Sequence[Message]) -> list[Segment]:
        """Return the segments of a conversation, none of which is trained on. Raises ValueError as `prompt` does."""
        return self._one("text", messages)

    def _one(self, work: Work, messages: Sequence[Message]) -> list[Segment]:
        (segments,) = self._render(work, [messages], checked_segments)
        if isinstance(segments, ValueError):
            raise segments
        return segments

    def _render(
        self,
        work: Work,
        conversations: Sequence[Sequence[Message]],
        checked: Callable[[Any, Sequence[Message], Tokenizer], Result],
    ) -> list[Result | ValueError]:
        """Return the results of the first conversations, at least one; the last result may be an error that says that
        the process has ended. `checked` makes a result of an answer of the process."""
        results: list[Result | ValueError] = []
        sizes = list(map(_characters, conversations))
        with self._lock:
            worker = self._worker
            if worker is None or not worker.own:
                worker = self._start()
            self._worker = None  # until all its answers are read
            try:
                seconds = CLOCK * SECONDS * len(conversations) + SECONDS_TO_SEND * sum(sizes)
                with worker.within(seconds, "for a conversation"):
                    worker.send({"work": work, "conversations": conversations})
                    for messages, size in zip(conversations, sizes, strict=True):
                        longest = 64 * (OUTPUT + size)
                        answer = worker.receive(longest * max(1, len(messages)))  # each answer may be a sequence
                        if type(answer) is dict:
                            results.append(ValueError(f"{_named(self._tokenizer)} {answer.get('error')}"))
                        else:
                            results.append(checked(answer, messages, self._tokenizer))
            except ValueError as error:
                return [*results, error]
            self._worker = worker
        return results

    def _start(self) -> "Worker":
        """Start a process and compile the template in it."""
        worker = Worker(_named(self._tokenizer))
        with worker.within(START_SECONDS, "to be compiled"):
            worker.send(self._setup)
            answer = worker.receive(100_000)
        if answer:
            worker.end()
            raise ValueError(f"{_named(self._tokenizer)} cannot be used: {answer}")
        return worker


def _named(tokenizer: Tokenizer) -> str:
    return f"the chat template of tokenizer {tokenizer.name}"


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.content) + len(message.extra) for message in messages)


class Worker:
    """A process that runs `template_worker.py`, and the values sent to it and received from it.

    The process ends when this object is deleted, when `end` is called, or when the parent process exits.

    Args:
      named: the template's name in errors.
    """

    def __init__(self, named: str):
        self._named = named
        self._pid = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", template_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # shields it from Ctrl-C, which ends an answer in a chat
        )
        self._late = False
        self.end: weakref.finalize[..., Any] = weakref.finalize(self, _end, self._process, self._pid)
        """Finalizer that kills the process and waits for it."""

    @property
    def own(self) -> bool:
        """True if this process started the worker; False if it was forked from the process that did."""
        return self._pid == os.getpid()

    @contextmanager
    def within(self, seconds: float, work: str) -> Iterator[None]:
        """Context that kills the process if the block takes longer than `seconds`, and ends it after any error.

        Raises ValueError, with the cause, if the process ended during `work` or sent an invalid answer.
        """

        def kill() -> None:
            self._late = True
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            try:
                yield
            finally:
                timer.cancel()
        except EOFError:
            raise ValueError(f"{self._named} {self._cause_of_death(work)}; choose another template") from None
        except BaseException:  # a late answer may still arrive
            self.end()
            raise

    def send(self, value: Any) -> None:
        """Send a value. Raises EOFError if the process is gone, as `receive` does."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError from error

    def receive(self, most: int) -> Any:
        """Receive the next value, of at most `most` bytes. The sender may be controlled by an untrusted template."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline(most)
        if not line.endswith(b"\n"):
            raise EOFError
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EOFError from error

    def _cause_of_death(self, work: str) -> str:
        """End the process, and describe how the template caused that during `work`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        code = self._process.returncode
        self.end()
        if self._late or code == -signal.SIGPROF:
            return f"takes more than {SECONDS:g} s {work}"
        if code == TOO_MUCH_MEMORY:
            return f"takes more than {MEMORY / 2**30:g} GiB of memory {work}"
        if code == TOO_MUCH_OUTPUT:
            return f"makes more than {OUTPUT:,} characters besides those of the messages"
        how = "sent an invalid answer" if code is None else f"ended with code {code}"
        return f"broke its process, which {how}, {work}"


def _end(process: subprocess.Popen[Any], pid: int) -> None:
    if pid != os.getpid():  # this process was forked from its owner
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _source(tokenizer: Tokenizer) -> str:
    """Return the template's source. Raises ValueError if the tokenizer has none."""
    source: Any = tokenizer.config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not source or type(source) is not str:
        raise ValueError(
            f"tokenizer {tokenizer.name} has no chat template: put a tokenizer_config.json with a chat_template beside "
            "it, or choose another template"
        )
    return source


def _check_version() -> None:
    installed = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < SAFE_VERSION:
        safe = ".".join(map(str, SAFE_VERSION))
        raise ValueError(
            f"jinja2 {installed} lets a tokenizer's chat template read files and the environment of this "
            f"process: pip install -U 'jinja2>={safe}'"
        )
