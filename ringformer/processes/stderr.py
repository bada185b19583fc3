"""Standard error: it may go away without ending a run, and JAX's C++ writes to a file, not to it.

A process that loses the coordination service is aborted by JAX's runtime with pages of stack, and no callback of
Python's can prevent it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_kept: list[object] = []
"""C++ holds no reference to a callback of Python's."""


class PrefixedStream:
    """A text stream that begins every line with a prefix."""

    def __init__(self, stream: IO[str], prefix: str):
        self._stream, self._prefix, self._begun = stream, prefix, False

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(line if self._begun else self._prefix + line)
            self._begun = not line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def divert_native_stderr(path: Path, prefix: str = "") -> None:
    """From now on what is not Python's goes to the end of `path`; what Python writes stays, with a prefix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    own = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = PrefixedStream(own, prefix) if prefix else own


def on_abort(ended: Callable[[], int]) -> None:
    """Where C++ aborts the process: call `ended`, which may say why, and exit with what it returns.

    abort() raises the signal in the thread that calls it, so that this is no handler between any two instructions.
    """

    def aborted(_number):
        code = 128 + signal.SIGABRT
        try:
            code = ended()
        finally:
            os._exit(code)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(ctypes.c_int(signal.SIGABRT), handler)


class _Lasting:
    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """While entered, nobody who writes to `sys.stderr` hears that it is gone; metrics.jsonl has what was to be read."""
    before = sys.stderr
    sys.stderr = _Lasting(before)
    try:
        yield
    finally:
        sys.stderr = before
