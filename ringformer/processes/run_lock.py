"""The lock of a run's folder: one run at a time writes there, from whatever host.

    RUN_DIR/lock/3.json    the third holder: its host and process, and a count of beats

Whoever makes the file of the next number holds the lock; a file can be made once (O_EXCL, on NFS too), and no other
lock of the file system is needed. A holder counts a beat every `BEAT` seconds and notes when it lets go. Who finds
another's file takes the next number

- at once, if the holder let go, or was a process of this machine that is gone;
- if there was no beat for `PATIENCE` seconds of the own clock: no clocks of two hosts are compared.

Else it is refused, by the holder's name. A holder that was silent for so long, and lives, finds that it was succeeded
and stops (`check`).
"""

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

from ringformer.files.this_process import began, machine
from ringformer.processes.agreement import from_process_0

BEAT = 4.0
PATIENCE = 40.0
POLL = 0.5
"""Seconds."""


class RunLock:
    """The lock of `run_dir` while entered, of all processes of a run together; process 0 takes it for them.

    Entering raises ValueError on all of them, with the holder's host and process, if the lock is held, and OSError if
    the folder cannot be written to.
    """

    def __init__(self, run_dir: Path):
        self._run_dir, self._folder = run_dir, run_dir / "lock"
        self._number = 0
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
        """Let go of the lock, if it is this process's."""
        if self._number:
            self._ended.set()
            self._thread.join()
            if not self._lost:
                with suppress(OSError):  # then the next holder finds a process that is gone, or silent
                    self._write(released=True)

    def check(self) -> None:
        """Raise OSError if this process no longer has the lock: it was taken for dead, or its file was deleted."""
        if self._lost:
            raise OSError(f"{self._run_dir} {self._lost}: this process stops, and saves nothing more")

    def take(self) -> None:
        """Take the lock for this process alone."""
        if self._folder.exists() and not self._folder.is_dir():
            raise OSError(f"{self._folder} is a file, where a run has the folder of its lock: move it away")
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            last = max(self._numbers(), default=0)
            if last and not self._is_over(last):
                continue  # another has succeeded it meanwhile
            self._number = last + 1
            try:
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                continue  # another was faster
            self._write()
            if max(self._numbers()) == self._number:
                break
            self._path.unlink(missing_ok=True)  # a number that is long past, and its file gone
        for number in self._numbers():
            if number < self._number:
                (self._folder / f"{number}.json").unlink(missing_ok=True)
        self._thread.start()

    def _is_over(self, number: int) -> bool:
        """Wait until the holder `number` is known to be gone; False if it is no longer the last one. Raises ValueError
        if it lives."""
        path = self._folder / f"{number}.json"
        first, since, told = None, time.monotonic(), False
        while max(self._numbers(), default=0) == number:
            text, holder = _read(path)
            if holder.get("released"):
                return True
            here = bool(machine()) and holder.get("machine") == machine()
            if here and began(holder["pid"]) != holder["began"]:
                return True
            if here or (holder and first is not None and text != first):
                raise ValueError(
                    f"{self._run_dir} is being trained by {_name(holder)}: wait for it, or end it, or choose another "
                    "run_dir"
                )
            if time.monotonic() - since > PATIENCE:
                return True
            if not told and (holder or time.monotonic() - since > BEAT):  # it may just be being written
                who = _name(holder) if holder else f"somebody whom {path} does not name"
                print(
                    f"{self._run_dir} was being trained by {who}: waiting {PATIENCE:.0f} s for a sign of life",
                    file=sys.stderr,
                )
                told = True
            first = text if holder else first
            time.sleep(POLL)
        return False

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT):
            self._beats += 1
            try:
                if (last := max(self._numbers(), default=0)) > self._number:
                    holder = _name(_read(self._folder / f"{last}.json")[1])
                    self._lost = f"is {holder}'s now, which heard nothing of this one for {PATIENCE:.0f} s"
                    return
                self._write()
            except FileNotFoundError:
                self._lost = f"has lost its lock, {self._path}"
                return
            except OSError:
                continue  # the file system may come back; if it does not, a save says so

    def _write(self, released: bool = False) -> None:
        """In place and at once; beats keep the length of the file."""
        content = {**self._holder, "beats": f"{self._beats:012d}", "released": released}
        try:
            with self._path.open("r+b", buffering=0) as file:
                file.write(json.dumps(content).ljust(400).encode() + b"\n")
        except OSError as error:
            if error.filename is None:  # of a full disk
                error.filename = str(self._path)
            raise

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number}.json"

    def _numbers(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.json") if re.fullmatch("[0-9]+", path.stem)]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a holder's file and what it says; nothing if it is being written or gone."""
    try:
        text = path.read_text()
        holder = json.loads(text)
    except (OSError, ValueError):
        return "", {}
    return text, holder if type(holder) is dict and {"host", "pid", "machine", "began"} <= holder.keys() else {}


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'a host that is not named')}"
