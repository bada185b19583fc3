"""Run something in a fork of this process, which has imported the libraries but not ringformer."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.commit import ROOT
from tests.mutations.startup.replaced_file import VARIABLE, replace_file

STARTUP = Path(__file__).parent / "startup"

LIBRARIES = (
    "jax",
    "jax.numpy",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "pytest",
    "ml_collections",
    "jaxtyping",
    "beartype",
)
"""Imported once, before the forks. None of them starts a thread or a backend on import."""

QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
"""Arguments of pytest in a fork."""

PAUSE = 0.05
"""Seconds between two looks at a fork that has not ended."""


class Answer(NamedTuple):
    """Everything that a fork leaves behind."""

    value: dict | None
    """Returned by the work; None if it raised, died or was stopped."""
    output: str
    stopped: bool
    """The time limit passed."""


def in_a_fork(work: Callable[[Path], dict], limit: float | None = None) -> Answer:
    """Call `work(folder)` in a fork, with an empty folder that is deleted afterwards.

    After `limit` seconds, the fork and the processes that it started are killed.
    """
    for library in LIBRARIES:
        import_module(library)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output, value = folder / "output.txt", folder / "value.json"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _work_and_exit(work, folder, output, value)
        stopped = True
        try:
            stopped = not _ends(child, limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if stopped:
                os.waitpid(child, 0)
        return Answer(
            value=json.loads(value.read_text()) if value.exists() and not stopped else None,
            output=output.read_text(errors="replace") if output.exists() else "",
            stopped=stopped,
        )


def _ends(child: int, limit: float | None) -> bool:
    """Wait for a process, and return whether it ended in time."""
    if limit is None:
        os.waitpid(child, 0)
        return True
    last = time.monotonic() + limit
    while time.monotonic() < last:
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended:
            return True
        time.sleep(PAUSE)
    return False


def _work_and_exit(work: Callable[[Path], dict], folder: Path, output: Path, value: Path):
    """Do the work in the child, write its value, and end without the parent's handlers."""
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", closefd=False)
        os.chdir(ROOT)
        forget_pytest()
        answer = json.dumps(work(folder))
        unfinished = value.with_suffix(".part")
        unfinished.write_text(answer)
        unfinished.rename(value)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def forget_pytest() -> None:
    """Remove pytest's own variables, if a test has started this process."""
    for name in list(os.environ):
        if name.startswith("PYTEST_"):
            del os.environ[name]


def replace_here_and_below(path: str, text: str, folder: Path) -> None:
    """Have this process and all that it starts read `text` instead of a source file of the package.

    `folder` must outlive these processes.
    """
    written = folder / "replaced.json"
    written.write_text(json.dumps({"path": path, "text": text}))
    searched = [str(STARTUP)]
    if "PYTHONPATH" in os.environ:
        searched.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(searched)
    os.environ[VARIABLE] = str(written)
    replace_file(path, text)
