"""Small files that unpack to large documents: the limit of a document holds before they are unpacked, so the peak of
`ringformer data prepare` stays near that of a file with one short line."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringformer.cli import main
from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.stores.options import StoreOptions

MOST = 2**24
"""The limit of a document."""
LARGE = 2**28
"""Bytes, or values, of a bomb."""
SPARE = 2**27
"""Memory that a preparation may take besides that of one line, and of two documents."""
TEXT = "a" * MOST


def pieces(path: Path, first: str, middle: str, last: str, encoding: str = "utf-8") -> None:
    """Write a compressed file in which `middle` is repeated up to `LARGE` bytes."""
    repeated = middle.encode(encoding).removeprefix("\ufeff".encode(encoding))
    if path.suffix == ".gz":
        member = gzip.compress(repeated, 1)
        times = LARGE // len(repeated)
        path.write_bytes(gzip.compress(first.encode(encoding)) + member * times + gzip.compress(last.encode()))
        return
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as file:
        file.write(first.encode(encoding))
        for _ in range(LARGE // len(repeated)):
            file.write(repeated)


def tables(path: Path, **columns) -> None:
    """Write a table, with compressed values."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", write_statistics=False)
        return
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table)


def large_text() -> pa.Array:
    return pa.array(["a" * LARGE], pa.large_string())


def repeated(count: int, of: str) -> pa.Array:
    """Return so many references to one text of a dictionary."""
    return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([of]))


def one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays([0, len(values)], values)


def turns(contents: pa.Array) -> pa.Array:
    """Return one conversation of many turns."""
    roles = pa.array(["user", "assistant"] * (len(contents) // 2)).dictionary_encode()
    return one_list(pa.StructArray.from_arrays([roles, contents], ["role", "content"]))


class Bomb(NamedTuple):
    """A small file with a large content."""

    name: str
    write: Callable[[Path], None]
    format: str = "documents"
    refused: bool = True
    options: tuple[str, ...] = ()


OPEN = '{"text": "'
CHAT = '{"messages": [{"role": "user", "content": "'
VALUES = '{"text": "a", "b": [' + "[]," * (MOST // 3 - 100) + "[]]}"
SMALL_TEXT = pa.array(["short"])
BOMBS = (
    Bomb("line.jsonl.gz", lambda path: pieces(path, OPEN, TEXT, "")),
    Bomb("line.jsonl.zst", lambda path: pieces(path, OPEN, TEXT, "")),
    Bomb("blank.jsonl.gz", lambda path: pieces(path, "", " " * MOST, "")),
    Bomb("utf16.jsonl.gz", lambda path: pieces(path, OPEN, TEXT, "", "utf-16"), options=("--encoding=utf-16",)),
    Bomb("value.json.gz", lambda path: pieces(path, f"[{OPEN}", TEXT, "")),
    Bomb("space.json.gz", lambda path: pieces(path, "[", " " * MOST, "")),
    Bomb("many.json.gz", lambda path: pieces(path, "[1", ",[1]" * (MOST // 4), "")),
    Bomb("values.jsonl", lambda path: path.write_text(VALUES)),
    Bomb("values.json", lambda path: path.write_text(f"[{VALUES}]")),
    Bomb("chat.jsonl.gz", lambda path: pieces(path, CHAT, TEXT, ""), "messages"),
    Bomb("chat.json.gz", lambda path: pieces(path, f"[{CHAT}", TEXT, ""), "messages"),
    Bomb("text.parquet", lambda path: tables(path, text=large_text())),
    Bomb("text.arrow", lambda path: tables(path, text=large_text())),
    Bomb("repeated.parquet", lambda path: tables(path, text=repeated(10**6, "a" * 2 * MOST))),
    Bomb("repeated.arrow", lambda path: tables(path, text=repeated(10**6, "a" * 2 * MOST))),
    Bomb("other.parquet", lambda path: tables(path, text=SMALL_TEXT, other=large_text()), refused=False),
    Bomb("other.arrow", lambda path: tables(path, text=SMALL_TEXT, other=large_text()), refused=False),
    Bomb("tokens.parquet", lambda path: tables(path, input_ids=one_list(np.zeros(LARGE // 8, np.int64))), "tokens"),
    Bomb("tokens.arrow", lambda path: tables(path, input_ids=one_list(np.zeros(LARGE // 8, np.int64))), "tokens"),
    Bomb("chat.parquet", lambda path: tables(path, messages=turns(repeated(1000, "a" * 2**20))), "messages"),
    Bomb("chat.arrow", lambda path: tables(path, messages=turns(repeated(1000, "a" * 2**20))), "messages"),
    Bomb("turns.parquet", lambda path: tables(path, messages=turns(repeated(2**22, "a"))), "messages"),
    Bomb("turns.arrow", lambda path: tables(path, messages=turns(repeated(2**22, "a"))), "messages"),
    Bomb("missing.parquet", lambda path: tables(path, text=pa.nulls(10**7, pa.string()))),
    Bomb("wide.parquet", lambda path: tables(path, text=repeated(64, "a" * 2**21)), refused=False),
    Bomb("wide.arrow", lambda path: tables(path, text=pa.array(["a" * 2**21] * 64))),
)
MEASURE = """
import os, subprocess, sys, threading, time
from pathlib import Path

def peak_of(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return 0

peaks = {}
def watch():
    while process.poll() is None:
        try:
            family = [process.pid, *Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
            for pid in family:
                peaks[pid] = max(peaks.get(pid, 0), peak_of(pid))
        except OSError:
            pass
        time.sleep(0.01)

process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
watcher = threading.Thread(target=watch)
watcher.start()
watcher.join()
print(process.returncode, sum(peaks.values()))
"""
"""The peak of a preparation is that of its process and of the process that reads tables for it, together. A small
process measures them, because the peak of a process counts that of its parent before it."""
CHEAP = ("repeated.arrow", "repeated.parquet", "chat.arrow", "chat.parquet", "values.jsonl")


def prepared(folder: Path, path: Path, *options: str) -> tuple[int, str]:
    """Prepare a file in another process; return the peak of its memory in bytes, and its error."""
    kind = path.name.split(".")[1]
    command = [sys.executable, "-m", "ringformer", "data", "prepare", f"--source={kind}:{path}", *options]
    command += [f"--store={folder / 'store'}", "--tokenizer=bytes", "--held_out=0", f"--max_document_bytes={MOST}"]
    measured = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True)
    status, peak = map(int, measured.stdout.split()[-2:])
    assert status in (0, 1, 2), f"status {status}: {measured.stderr}"
    assert "Traceback" not in measured.stderr, measured.stderr
    error = ""
    if status:
        error = measured.stderr
    return peak * 1024, error


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> dict[str, int]:
    """Return the peaks of short files, by kind."""
    peaks = {}
    folder = tmp_path_factory.mktemp("control")
    line = json.dumps({"text": "a"}) + "\n"
    (folder / "a.jsonl").write_text(line)
    peaks["one line"], error = prepared(folder, folder / "a.jsonl")
    assert not error
    (folder / "b.jsonl").write_text((json.dumps({"text": "a" * 2**21}) + "\n") * 64)
    peaks["many lines"], error = prepared(folder / "many", folder / "b.jsonl")
    assert not error
    return peaks


@pytest.mark.parametrize("bomb", BOMBS, ids=[bomb.name for bomb in BOMBS])
@pytest.mark.slow
def test_the_peak_stays_near_that_of_one_line(tmp_path, control, bomb):
    path = tmp_path / bomb.name
    bomb.write(path)
    peak, error = prepared(tmp_path, path, f"--format={bomb.format}", *bomb.options)
    print(f"\n{bomb.name}: {path.stat().st_size:,} bytes, peak {peak / 2**20:.0f} MiB, {control}, {error[-300:]}")
    assert bool(error) == bomb.refused, error
    most = control["many lines" if bomb.name.startswith("wide") else "one line"] + 2 * MOST + SPARE
    assert peak <= most, f"{peak / 2**20:.0f} MiB of {most / 2**20:.0f}"


@pytest.mark.parametrize("name", CHEAP)
def test_a_bomb_is_refused_by_name(tmp_path, name):
    (bomb,) = (bomb for bomb in BOMBS if bomb.name == name)
    path = tmp_path / name
    bomb.write(path)
    options = StoreOptions(f"{path.suffix[1:]}:{path}", format=bomb.format, max_document_bytes=MOST, held_out=0.0)
    with pytest.raises(
        ValueError, match=rf"^{path}:\d+ has more than max_document_bytes={MOST:,} .*split it, or raise"
    ):
        open_or_build(tmp_path / "store", options, load_tokenizer("bytes"))


def test_a_bomb_trains_no_tokenizer(tmp_path, capsys):
    path = tmp_path / "repeated.parquet"
    tables(path, text=repeated(10**6, "a" * 2 * MOST))
    command = ["data", "tokenizer", f"--source=parquet:{path}", f"--out={tmp_path}/t.model", "--vocab_size=300"]
    assert main([*command, f"--max_document_bytes={MOST}"]) == 2
    assert f"{path}:0 has more than max_document_bytes={MOST:,} " in capsys.readouterr().err
    assert main([*command, "--max_document_bytes=0"]) == 2
    assert "--max_document_bytes=0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "t.model").exists()
