"""What JAX's C++ writes to stderr, in a file; and one line of ours where it aborts the process.

A process that loses the coordination service is aborted by JAX's runtime with pages of stack, and no callback of
Python's can prevent it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

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
