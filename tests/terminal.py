"""A terminal for stdout."""

import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_terminal(monkeypatch) -> Iterator[Callable[[], str]]:
    """A context in which stdout is a terminal; afterwards the function says what it was sent."""
    ours, theirs = pty.openpty()
    sent = b""
    with monkeypatch.context() as patch, os.fdopen(theirs, "w", encoding="utf-8") as stdout:
        patch.setattr(sys, "stdout", stdout)
        assert sys.stdout.isatty()
        yield lambda: sent.decode().replace("\r\n", "\n")
        stdout.flush()
        os.set_blocking(ours, False)
        while piece := _read(ours):
            sent += piece
    os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except BlockingIOError:
        return b""
