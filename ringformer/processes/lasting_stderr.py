"""A standard error that may go away: a closed terminal or pipe silences a run, and ends none."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


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
