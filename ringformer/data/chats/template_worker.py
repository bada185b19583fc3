"""Script of the process in which an untrusted chat template runs. It imports only the standard library and jinja2.

A template is a program. Jinja's sandbox restricts it to its inputs. The kernel enforces limits of time and memory and
kills this process if the template exceeds them. Each line of stdin and stdout is a JSON value.

    in   {"path": sys.path, "template": arguments of `ChatTemplate`,
          "seconds": CPU time to compile, and for a conversation, "memory": bytes in addition to those at the start}
    out  "" once the template is compiled, or the error
    in   {"work": "sequences", "prompt" or "text", "conversations": [[[role, content, extra, ...], ...], ...]}
          (`conversations.Message`)
    out  a line per conversation: the sequences that train on its answers (`trained_answers.py`); its prompt or text as
          [[text, False, is a control token], ...]; or {"error": ...}

A prompt is the conversation with the template's own generation prompt, and a text is the conversation without it, both
exactly as transformers renders them.
"""

import importlib
import json
import os
import resource
import select
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

TOO_MUCH_MEMORY = 3
"""Exit code of a process that exceeded its limit. If it takes too much time, SIGPROF ends it."""
ROOM = 32
"""Bytes of memory per byte of a line, to read it, break up names in it, render it and write it; the template's memory
is not included."""


def limit_memory(most: int) -> None:
    """Limit the process to `most` bytes of address space, if the kernel enforces such a limit (Linux)."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def address_space() -> int:
    """Return the bytes of address space of the process; 0 where the address space is not limited."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def read(parent: int, memory: int | None = None) -> Any:
    """Read the next value from stdin; exit at the end of stdin, or if the parent is gone.

    Another process may hold the other end of the pipe open, so stdin may not end although the parent is gone.

    Args:
      memory: bytes of address space to allow afterwards, besides those for the value itself.
    """
    while not select.select([sys.stdin.buffer], [], [], 2.0)[0]:
        if os.getppid() != parent:
            sys.exit()
    limit_memory(sys.maxsize)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.exit()
    if memory is not None:
        limit_memory(memory + ROOM * len(line))
    return json.loads(line)


def write(value: Any) -> None:
    """Write a value and flush it, because a buffer would be lost with the process."""
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def attempt(seconds: float, describe: Callable[[Exception], str], work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `work`, or {"error": its description}; the process dies if `work` exceeds its time or
    memory."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return work(*args)
    except MemoryError:
        os._exit(TOO_MUCH_MEMORY)
    except Exception as error:
        return {"error": describe(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def import_alone(name: str) -> types.ModuleType:
    """Import a module of this folder by its full name, without its packages, which would import JAX."""
    folder = os.path.dirname(os.path.abspath(__file__))
    package = name.rpartition(".")[0]
    while package:
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [folder]
        folder = os.path.dirname(folder)
        package = package.rpartition(".")[0]
    return importlib.import_module(name)


def main() -> None:
    parent = os.getppid()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = read(parent)
    sys.path[:] = setup["path"]  # for the parent's jinja2
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401  (before memory is limited)

    sandboxed = import_alone("ringformer.data.chats.sandboxed_template")
    answers = import_alone("ringformer.data.chats.trained_answers")
    memory = address_space() + setup["memory"]
    limit_memory(memory)
    template = attempt(setup["seconds"], sandboxed.describe, lambda: sandboxed.ChatTemplate(**setup["template"]))
    if isinstance(template, dict):
        write(template["error"])
        return
    write("")
    while True:
        request = read(parent, memory)
        works = {
            "sequences": lambda messages: answers.sequences_of(template, messages),
            "prompt": template.prompt,
            "text": template.text,
        }
        work = works[request["work"]]
        for messages in request["conversations"]:
            write(attempt(setup["seconds"], sandboxed.describe, work, messages))


if __name__ == "__main__":
    main()
