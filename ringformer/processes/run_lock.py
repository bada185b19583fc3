"""Lock of a run's folder: one run at a time writes there, from any host.

    RUN_DIR/lock/3.json    file of the third holder: its host and process, and a count of beats

The process that creates the file with the next number holds the lock. A file can be created only once (O_EXCL, on NFS
too), so no other lock of the file system is needed. A holder counts a beat every `BEAT` seconds and records when it
releases the lock. A process that finds another holder's file takes the next number

- at once, if the holder released the lock or was a process of this machine that is gone;
- after `PATIENCE` seconds without a beat, by its own clock: clocks of two hosts are never compared.

Otherwise it is refused, and the error names the holder. If a holder was silent for that long but is alive, it notices
that another process took the lock, and stops (`check`).
"""

import errno
import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from ringformer.files.json_text import parse_json
from ringformer.files.process_identity import began, machine
from ringformer.processes.agreement import from_process_0

BEAT = 4.0
PATIENCE = 40.0
POLL = 0.5
"""Seconds between two reads of another holder's file."""


class RunLock:
    """Context manager that holds the lock of `run_dir`. Process 0 takes the lock for all processes of a run.

    If another run holds the lock, entering raises ValueError on all processes, which names the holder's host and
    process. It raises OSError if the folder cannot be written to.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._folder = run_dir / "lock"
        self._number = 0
        self._path = self._folder
        self._holder: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": machine(),
            "began": began(os.getpid()),
        }
        self._beats = 0
        self._ended = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._beat_on, name="run lock", daemon=True)

    def __enter__(self) -> "RunLock":
        refusal: Exception | None = None
        if jax.process_index() == 0:
            try:
                self.take()
            except (ValueError, OSError) as error:
                refusal = error
        message = from_process_0(str(refusal or ""))
        if refusal or message:
            raise refusal or ValueError(message)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._number:
            self._ended.set()
            self._thread.join()
            if not self._lost:
                with suppress(OSError):  # the next holder will see that this process is gone or silent
                    self._write(released=True)

    def check(self) -> None:
        """Raise OSError if this process lost the lock: another process took it, or the lock's file was deleted."""
        if self._lost:
            raise OSError(f"{self._run_dir} {self._lost}: this process stops, and saves nothing more")

    def take(self) -> None:
        """Take the lock for this process alone."""
        if self._folder.exists() and not self._folder.is_dir():
            raise OSError(
                f"{self._folder} is a file, but a run keeps its lock in a folder of that name: move the file away"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            last = max(self._numbers(), default=0)
            if last and not self._is_over(last):
                continue  # another process took the lock meanwhile
            self._number = last + 1
            self._path = self._folder / f"{last + 1}.json"
            try:
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ESTALE):  # ESTALE: from the close, in a bucket (gcsfuse)
                    raise
                continue  # another process was faster
            self._write()
            if max(self._numbers()) == self._number:
                break
            self._path.unlink(missing_ok=True)  # the number was used before, and its file was deleted
        for number in self._numbers():
            if number < self._number:
                (self._folder / f"{number}.json").unlink(missing_ok=True)
        self._thread.start()

    def _is_over(self, number: int) -> bool:
        """Wait until holder `number` is certainly gone; return False if a later holder appears.

        Raises ValueError if the holder is alive.
        """
        path = self._folder / f"{number}.json"
        first = None
        since = time.monotonic()
        announced = False
        while max(self._numbers(), default=0) == number:
            text, holder = _read(path)
            if holder.get("released"):
                return True
            here = bool(machine()) and holder.get("machine") == machine()
            if here and began(holder["pid"]) != holder["began"]:
                return True
            if here or (holder and first is not None and text != first):
                raise ValueError(
                    f"{self._run_dir} is being trained by {_name(holder)}: wait for it, end it, or choose another "
                    "run_dir"
                )
            if time.monotonic() - since > PATIENCE:
                return True
            if not announced and (holder or time.monotonic() - since > BEAT):  # it may be in the middle of a write
                who = _name(holder) if holder else f"a process that {path} does not name"
                print(
                    f"{self._run_dir} was being trained by {who}: waiting {PATIENCE:.0f} s for a sign of life",
                    file=sys.stderr,
                )
                announced = True
            if holder:
                first = text
            time.sleep(POLL)
        return False

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT):
            self._beats += 1
            try:
                last = max(self._numbers(), default=0)
                if last > self._number:
                    _, holder = _read(self._folder / f"{last}.json")
                    self._lost = f"now belongs to {_name(holder)}, which saw no beat of this one for {PATIENCE:.0f} s"
                    return
                self._write()
            except FileNotFoundError:
                self._lost = f"has lost its lock, {self._path}"
                return
            except OSError:
                continue  # the file system may recover; if it does not, a save reports it

    def _write(self, released: bool = False) -> None:
        """Overwrite the holder's file in place with a single write; beats do not change the file's length."""
        content = {**self._holder, "beats": f"{self._beats:012d}", "released": released}
        try:
            with self._path.open("r+b", buffering=0) as file:
                file.write(json.dumps(content).ljust(400).encode() + b"\n")
        except OSError as error:
            if error.filename is None:  # a full disk
                error.filename = str(self._path)
            raise

    def _numbers(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.json") if re.fullmatch("[0-9]+", path.stem)]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a holder's file and its values; empty if it is being written or is gone."""
    try:
        text = path.read_text()
        holder = parse_json(text)
    except (OSError, ValueError):
        return "", {}
    if type(holder) is not dict or not {"host", "pid", "machine", "began"} <= holder.keys():
        return text, {}
    return text, holder


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unnamed host')}"
