"""A preparation is on the disk before it is there, and what a killed one left is removed by the next."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringformer.cli import main
from ringformer.data import ByteTokenizer, Document, build_stores
from ringformer.data.stores import folder
from ringformer.files.new_folder import this_process

DOCUMENTS = [Document(f"text {i}", f"document {i}") for i in range(50)]

BUILDS = """
import sys, time
from ringformer.cli import main
from ringformer.data import ByteTokenizer, Document, build_stores

def documents():
    for i in range(50):
        yield Document(f"text {i}", "d")
    print("half way", flush=True)
    sys.stdin.readline()

build_stores(sys.argv[1], documents(), ByteTokenizer(), held_out=0.2)
"""


def test_all_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """Every file and folder of it, and the folder that it is in after."""
    events, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append((path, path.stat().st_size))
        fsync(descriptor)

    def renamed(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    at = events.index("rename")
    (building,) = {event[0].relative_to(tmp_path).parts[0] for event in events[:at]}
    there = {(path.relative_to(tmp_path / "s"), path.stat().st_size) for path in (tmp_path / "s").rglob("*")}
    before = {(path.relative_to(tmp_path / building / "s"), size) for path, size in events[:at]}
    assert len(there) > 10 and {name for name, _ in there} | {Path(".")} <= {name for name, _ in before}
    assert {(name, size) for name, size in there if (tmp_path / "s" / name).is_file()} <= before
    assert [path for path, _ in events[at + 1 :]] == [tmp_path]


def start(store):
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDS, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "half way\n"
    return process


def test_leftovers_of_killed_builds_are_removed_those_of_live_ones_left(tmp_path):
    """Real processes: one is killed, another goes on beside the next build, and finds that it was slower."""
    (tmp_path / "s.building-notes").mkdir()
    (tmp_path / "other.building-01234567").mkdir()
    mine = {path.name for path in tmp_path.iterdir()}
    killed, alive = start(tmp_path / "s"), start(tmp_path / "s")
    owners = {json.loads(path.read_text())["pid"]: path.parent for path in tmp_path.glob("s.building-*/builder.json")}
    assert owners.keys() == {killed.pid, alive.pid}
    assert json.loads((owners[killed.pid] / "builder.json").read_text())["host"] == socket.gethostname()
    killed.send_signal(signal.SIGKILL)
    while Path(f"/proc/{killed.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)  # dead, but not waited for
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    assert {path.name for path in tmp_path.iterdir()} == mine | {"s", owners[alive.pid].name}
    assert not (tmp_path / "s" / "builder.json").exists()
    killed.communicate()
    alive.communicate("go on\n")
    assert alive.returncode == 1
    assert {path.name for path in tmp_path.iterdir()} == mine | {"s"}


@pytest.mark.parametrize("note", ["none", "torn", "another host", "before a boot", "an id that came again"])
def test_a_builder_that_cannot_be_asked_is_given_a_day(tmp_path, note):
    left = tmp_path / "s.building-0123abcd"
    (left / "train").mkdir(parents=True)
    (left / "train" / "tokens.bin").write_bytes(b"tokens")
    here = this_process()
    others = {"another host": {"host": "h", "machine": "h b"}, "before a boot": {"machine": "b"}}
    builder = here | others.get(note, {"began": "1"})
    if note != "none":
        (left / "builder.json").write_text(json.dumps(builder)[: 9 if note == "torn" else None])
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    if note == "an id that came again":
        assert not left.exists()
        return
    for path in (*left.rglob("*"), left):
        os.utime(path, (0, time.time() - 25 * 3600))
    build_stores(tmp_path / "s.building-00000000" / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    assert left.exists(), "it is of another folder"
    (tmp_path / "s").rename(tmp_path / "t")
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    assert not left.exists()


def test_a_store_of_the_version_before_says_so(tmp_path):
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    (tmp_path / "s" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest\.json is missing: delete the store and build it again"):
        folder.open_one(tmp_path / "s", ("train",))


@pytest.mark.parametrize("name", ["train/tokens.bin", "eval/tokens.bin", "eval/store.json", "report.json"])
def test_inspect_compares_every_file(tmp_path, capsys, name):
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    assert main(["data", "inspect", str(tmp_path / "s")]) == 0
    content = bytearray((tmp_path / "s" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "s" / name).write_bytes(content)
    capsys.readouterr()
    assert main(["data", "inspect", str(tmp_path / "s")]) == 2
    error = capsys.readouterr().err
    assert name in error and "delete the store and build it again" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["manifest.json", "report.json", "train/store.json", "eval/tokens.bin"])
@pytest.mark.parametrize("kind", ["pipe", "loop"])
def test_what_is_no_file_is_named(tmp_path, capsys, name, kind):
    """A pipe would keep its reader waiting for ever."""
    build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    path = tmp_path / "s" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    assert main(["data", "inspect", str(tmp_path / "s")]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1
