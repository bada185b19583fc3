"""A table with a flipped byte, wherever it is, is read or refused in one line that names it; the process lives."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[3]
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So, é."}]
COLUMNS = {
    "string": pa.array(["one", None, "zwei é", ""]),
    "large_string": pa.array(["one", "two", None], pa.large_string()),
    "tokens": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())),
    "large_tokens": pa.array([[1, 2], None, [3]], pa.large_list(pa.int64())),
    "dictionary": pa.array(["one", "two", "one"]).dictionary_encode(),
    "struct": pa.array([{"a": "b", "n": 1}, None]),
    "chats": pa.array([TURNS, TURNS * 2]),
}


def write(path, column):
    name = "input_ids" if "tokens" in path.name else "text"
    table = pa.table({name: column})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    new = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
    codec = "zstd" if "zstd" in path.name else None
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as file:
        file.write_table(table)


def flip(step: int, *files) -> None:
    """Flip every `step`-th byte of the files in another process; fail if it raises, or is killed."""
    command = [sys.executable, "-m", "tests.data.sources.flips", str(step), *map(str, files)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not ended.returncode, f"status {ended.returncode}: {ended.stderr[-3000:]}"


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow", "zstd.arrow", "a.parquet"])
@pytest.mark.slow
def test_no_flipped_byte_of_a_table_ends_the_process(tmp_path, name):
    files = []
    for column, values in COLUMNS.items():
        files.append(tmp_path / f"{column}-{name}")
        write(files[-1], values)
    flip(1, *files)


def test_few_flipped_bytes_of_tables_end_no_process(tmp_path):
    files = []
    for name in ("file.arrow", "zstd.arrow", "a.parquet"):
        for column in ("chats", "tokens"):
            files.append(tmp_path / f"{column}-{name}")
            write(files[-1], COLUMNS[column])
    flip(13, *files)


@pytest.mark.slow
def test_no_flipped_byte_of_json_ends_the_process(tmp_path):
    records = [{"text": "one é"}, {"text": "two"}]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    contents = {
        "a.jsonl": lines,
        "a.json": json.dumps(records).encode(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        flip(1, tmp_path / name)
