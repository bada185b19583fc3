"""The lock of a run's folder, with real processes: one holds it, a dead one's passes on, a live one's does not."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ringformer.processes import run_lock
from ringformer.processes.run_lock import RunLock

CHILD = """
import sys
from pathlib import Path
from ringformer.processes.run_lock import RunLock

print("ready", flush=True)
for line in sys.stdin:
    lock = RunLock(Path(line.strip()))
    try:
        lock.take()
    except ValueError as error:
        print(error, flush=True)
        sys.stdin.readline()
    else:
        print("held", flush=True)
        sys.stdin.readline()
        lock.release()
    print("done", flush=True)
"""
ELSEWHERE = {"host": "elsewhere", "pid": 7, "machine": "elsewhere b00t pid:[1]", "began": "1", "beats": 3}


class Child:
    """A process that takes locks when it is told to."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.pid = self.process.pid

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def tell(self, line: object) -> None:
        self.process.stdin.write(f"{line}\n")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def children():
    made = [Child() for _ in range(3)]
    assert [child.answer() for child in made] == ["ready"] * 3
    yield made
    for child in made:
        child.end()


def write_holder(run_dir, **changes):
    (run_dir / "lock").mkdir(parents=True, exist_ok=True)
    (run_dir / "lock" / "1.json").write_text(json.dumps({**ELSEWHERE, **changes}))


def dead_process_here() -> dict:
    ended = subprocess.Popen(["true"])
    began = run_lock.began(ended.pid)
    ended.wait()
    return {"host": socket.gethostname(), "pid": ended.pid, "machine": run_lock.machine(), "began": began or "1"}


@pytest.mark.parametrize("found", ["nothing", "released", "dead"])
def test_of_processes_that_start_at_once_one_has_the_lock(children, tmp_path, found):
    for attempt in range(20):
        run_dir = tmp_path / str(attempt)
        if found != "nothing":
            write_holder(run_dir, **(dead_process_here() if found == "dead" else {"released": True}))
        for child in children:
            child.tell(run_dir)
        said = [child.answer() for child in children]
        (holder,) = (child for child, answer in zip(children, said, strict=True) if answer == "held")
        name = f"{run_dir} is being trained by process {holder.pid} on {socket.gethostname()}"
        assert all(answer.startswith(name) for answer in said if answer != "held"), said
        for child in children:
            child.tell("let go")
        assert [child.answer() for child in children] == ["done"] * 3
    assert len(list((run_dir / "lock").iterdir())) == 1


def test_who_is_slower_by_a_moment_is_refused(tmp_path, monkeypatch):
    """Another makes the file between the look and the attempt."""
    other, real_open = RunLock(tmp_path), os.open

    def open_late(*arguments):
        monkeypatch.setattr(os, "open", real_open)
        other.take()
        return real_open(*arguments)

    monkeypatch.setattr(os, "open", open_late)
    with pytest.raises(ValueError, match=f"is being trained by process {os.getpid()} on"), RunLock(tmp_path):
        pass
    other.check()
    other.release()
    assert json.loads((tmp_path / "lock" / "1.json").read_text())["released"]


def test_who_is_refused_by_a_bucket_has_no_lock(tmp_path, monkeypatch):
    """On a mounted bucket, both make the file, and the close of the second says that there is another one."""
    other, real_close, refused = RunLock(tmp_path), os.close, None

    def close_late(descriptor):
        monkeypatch.setattr(os, "close", real_close)
        real_close(descriptor)
        (tmp_path / "lock" / "1.json").unlink()
        other.take()
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "close", close_late)
    try:
        RunLock(tmp_path).take()
    except (ValueError, OSError) as error:
        refused = error
    assert f"is being trained by process {os.getpid()} on" in str(refused)
    other.check()
    other.release()


def test_a_killed_process_of_this_machine_is_succeeded_at_once(tmp_path):
    child = Child()
    child.answer()
    child.tell(tmp_path)
    assert child.answer() == "held"
    with pytest.raises(ValueError, match=f"process {child.pid} on {socket.gethostname()}"), RunLock(tmp_path):
        pass
    os.kill(child.pid, signal.SIGSTOP)  # it lives
    with pytest.raises(ValueError, match=f"process {child.pid} on"), RunLock(tmp_path):
        pass
    os.kill(child.pid, signal.SIGKILL)
    while run_lock.began(child.pid):
        time.sleep(0.01)  # it is not waited for: a zombie is gone too
    since = time.monotonic()
    with RunLock(tmp_path) as lock:
        lock.check()
    assert time.monotonic() - since < 1
    child.end()


def test_a_pid_that_came_again_is_no_holder(tmp_path):
    write_holder(tmp_path, **dead_process_here() | {"pid": os.getpid()})
    with RunLock(tmp_path):
        pass


def no_wall_clock():
    raise AssertionError("clocks of two hosts need not agree")


@pytest.mark.parametrize("age", [-(10**8), 0, 10**8], ids=["long ago", "now", "in the future"])
@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_silent_holder_elsewhere_is_succeeded_after_a_wait(tmp_path, monkeypatch, age, torn):
    """Whatever times its host wrote."""
    monkeypatch.setattr(run_lock, "PATIENCE", 0.6)
    monkeypatch.setattr(run_lock, "POLL", 0.1)
    monkeypatch.setattr(time, "time", no_wall_clock)
    write_holder(tmp_path)
    path = tmp_path / "lock" / "1.json"
    if torn:
        path.write_text("")
    os.utime(path, (1.8e9 + age, 1.8e9 + age))
    since = time.monotonic()
    with RunLock(tmp_path):
        assert 0.6 <= time.monotonic() - since < 2
    assert [p.name for p in (tmp_path / "lock").iterdir()] == ["2.json"]


def test_the_same_host_with_other_pids_is_elsewhere(tmp_path, monkeypatch):
    """A container: its pids say nothing here."""
    monkeypatch.setattr(run_lock, "PATIENCE", 0.6)
    write_holder(tmp_path, **dead_process_here() | {"machine": f"{socket.gethostname()} b00t pid:[1]"})
    since = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - since >= 0.6


@pytest.mark.parametrize("first", ["", json.dumps(ELSEWHERE)], ids=["being written", "written"])
def test_a_holder_elsewhere_that_beats_is_named(tmp_path, monkeypatch, first):
    monkeypatch.setattr(run_lock, "POLL", 0.05)
    write_holder(tmp_path)
    path = tmp_path / "lock" / "1.json"
    path.write_text(first)
    end = threading.Event()

    def beat():
        beats = 4
        while not end.wait(0.2):
            beats += 1
            path.write_text(json.dumps(ELSEWHERE | {"beats": beats}))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match="is being trained by process 7 on elsewhere"), RunLock(tmp_path):
            pass
    finally:
        end.set()
        thread.join()


def test_who_was_taken_for_dead_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    with RunLock(tmp_path) as lock:
        (tmp_path / "lock" / "2.json").write_text(json.dumps(ELSEWHERE))
        wait_for_loss(lock, "now belongs to process 7 on elsewhere, which saw no beat of this one")
    assert json.loads((tmp_path / "lock" / "2.json").read_text()) == ELSEWHERE


def test_a_deleted_lock_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    with RunLock(tmp_path) as lock:
        (tmp_path / "lock" / "1.json").unlink()
        wait_for_loss(lock, "has lost its lock")


def wait_for_loss(lock, message):
    lock.check()
    with pytest.raises(OSError, match=f"{message}.*: this process stops, and saves nothing more"):
        for _ in range(100):
            time.sleep(0.05)
            lock.check()


def test_a_holder_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    path = tmp_path / "lock" / "1.json"
    with RunLock(tmp_path):
        seen = set()
        for _ in range(100):
            seen.add(json.loads(path.read_text() or '{"beats": ""}')["beats"])
            time.sleep(0.01)
    assert len(seen) > 3 and json.loads(path.read_text())["released"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "lock").write_text("a file")
    with pytest.raises(OSError, match="lock"), RunLock(tmp_path):
        pass


@pytest.mark.slow
def test_a_lost_host_delays_the_next_start_by_less_than_a_minute(tmp_path):
    write_holder(tmp_path)
    since = time.monotonic()
    with RunLock(tmp_path):
        assert run_lock.PATIENCE <= time.monotonic() - since < 60
    assert run_lock.PATIENCE >= 5 * run_lock.BEAT


def test_what_else_may_lie_there(tmp_path, monkeypatch, capsys):
    """A holder's file of garbage is waited for, with a word; a name that is no number is none; a file is no folder."""
    for name in ("PATIENCE", "BEAT", "POLL"):
        monkeypatch.setattr(run_lock, name, {"PATIENCE": 0.6, "BEAT": 0.2, "POLL": 0.05}[name])
    folder = tmp_path / "lock"
    folder.mkdir()
    (folder / "3.json").write_text("\0" * 40)
    (folder / "²2.json").write_text("{}")
    with RunLock(tmp_path):
        pass
    said = capsys.readouterr().err
    assert said.count("waiting") == 1 and f"a process that {folder / '3.json'} does not name" in said
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(
        OSError, match="lock is a file, but a run keeps its lock in a folder of that name: move the file away"
    ):
        RunLock(tmp_path).take()
