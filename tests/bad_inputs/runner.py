"""Runs a row of the table as a user's command, in this process, and says what is wrong with how it ended."""

import faulthandler
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ringformer import cli

SECONDS = 60.0
"""Seconds after which a row hangs."""
LONGEST = 1200
MOST_LINES = 16
"""Characters and lines of a short message; a message that lists tensors or files has a line for each."""

Content = str | bytes | Callable[[Path], None]
"""Content of a file, or a function that makes or changes something at its path."""


class Hang(BaseException):
    """A row that took too long. No handler of errors takes it for one."""


@dataclass(frozen=True)
class Row:
    """A bad input. Its command runs beside the folder `toys`, which it may read, and may write in the folder `row`."""

    name: str
    command: str
    """The command line after `ringformer`, as in a shell."""
    message: str = ""
    """A part of the line that it prints to stderr."""
    harmless: str = ""
    """Why it does no harm, if it is accepted."""
    files: dict[str, Content] = field(default_factory=dict)
    """Files in the folder `row`."""
    copies: dict[str, str] = field(default_factory=dict)
    """Folders in `row` that begin as copies of folders in `toys`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    stdin: bytes = b""
    code: int = 2
    """Exit code of a refusal."""


def make_ready(row: Row, base: Path) -> None:
    """Make the folder `row` in `base` with the row's files."""
    folder = base / "row"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, toy in row.copies.items():
        shutil.copytree(base / "toys" / toy, folder / name)
    for name, content in row.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8", errors="surrogatepass")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)


def faults_of(row: Row, base: Path, read: Callable[[], tuple[str, str]], seconds: float = SECONDS) -> list[str]:
    """Run a row in `base`, for which `make_ready` was called; return what is wrong with how it ended.

    Args:
      read: returns what was printed to stdout and stderr since its last call.
      seconds: time limit.
    """
    before = state_of(base)
    read()
    try:
        with time_limit(seconds):
            code = cli.main(shlex.split(row.command))
    except Hang:
        return [f"it hangs: it took more than {seconds:g} s"]
    except BaseException:  # SystemExit, too: main returns its code
        return [f"a traceback: {traceback.format_exc()}"]
    _, err = read()
    faults = []
    if "Traceback" in err:
        faults.append(f"a traceback: {err}")
    expected = 0 if row.harmless else row.code
    if code != expected:
        faults.append(f"exit code {code}, expected {expected}: {err}")
    if not row.harmless:
        faults += faults_of_message(row, err)
    if state_of(base) != before:
        changed = dict(state_of(base).items() ^ before.items())
        faults.append(f"it changed files: {', '.join(sorted(changed))}")
    return faults


def faults_of_message(row: Row, err: str) -> list[str]:
    """Return what is wrong with the message of a refusal."""
    faults = []
    if not row.message or row.message not in err:
        faults.append(f"the message lacks {row.message!r}: {err}")
    lines = err.count("\n")
    if lines > MOST_LINES or len(err) > LONGEST:
        faults.append(f"the message has {lines} lines and {len(err)} characters: {err[: 2 * LONGEST]}")
    return faults


def state_of(base: Path) -> dict[str, tuple[int, int, int]]:
    """Return the kind, size and time of everything in `base`, except in the folder `row`."""
    state = {}
    for folder, folders, names in os.walk(base):
        if Path(folder) == base:
            folders.remove("row")
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            state[path] = status.st_mode, status.st_size, status.st_mtime_ns
    return state


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the block if it takes longer. If it is then in a library that does not come back, end the
    process."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(60 + 2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
