"""Standard error and output: a run survives the loss of its terminal, and JAX's C++ code writes to a file instead.

Gloo, which connects CPUs, prints a line for each device and communicator. JAX's runtime aborts a process that loses the
coordination service, and prints pages of stack traces. No Python callback can prevent this.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_kept: list[object] = []
"""Callbacks that C++ calls. They are kept here because C++ holds no reference to them."""


class LastingStream:
    """Text stream that begins every line with a prefix, and drops text that it cannot write. If a terminal is lost,
    metrics.jsonl still has the numbers."""

    def __init__(self, stream: Any, prefix: str = ""):
        self._stream = stream
        self._prefix = prefix
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            for line in text.splitlines(keepends=True):
                self._stream.write(line if self._begun else self._prefix + line)
                self._begun = not line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def divert_native_stderr(path: Path, prefix: str = "") -> None:
    """Append what native code writes to stderr to `path` from now on; Python still writes to stderr, with a prefix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    own = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = LastingStream(own, prefix)


def divert_native_stdout(path: str | Path) -> None:
    """Append what native code writes to stdout to `path` from now on; Python still writes to stdout."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout = own


def on_abort(ended: Callable[[], int]) -> None:
    """Call `ended` when C++ aborts the process, and exit with the code that it returns.

    abort() raises the signal in the thread that calls it, so this handler does not interrupt arbitrary instructions.
    """

    def aborted(_number):
        code = 128 + signal.SIGABRT
        try:
            code = ended()
        finally:
            os._exit(code)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.append(handler)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
