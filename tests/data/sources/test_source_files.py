"""Compressed files are read as what was compressed; one that is cut short is named."""

import gzip
import json
import os

import pyarrow as pa
import pytest

from ringformer.data import read_documents
from ringformer.data.sources.records import read_rows

TEXTS = ["first\r\n", "zweite é", os.urandom(30_000).hex()]


def compress(path, content: bytes):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content[:7]) + gzip.compress(content[7:]))  # members, as pigz and cat make them
    else:
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as file:
            file.write(content)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_are_read_as_their_contents(tmp_path, suffix):
    for i, text in enumerate(TEXTS):
        compress(tmp_path / f"{i}.txt.{suffix}", text.encode())
    compress(tmp_path / f"a.jsonl.{suffix}", "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode())
    compress(tmp_path / f"b.json.{suffix}", json.dumps([{"text": t} for t in TEXTS]).encode())
    for source in (f"text:{tmp_path}/*.txt.*", f"jsonl:{tmp_path}/*.jsonl.*", f"json:{tmp_path}/*.json.*"):
        assert [document.text for document in read_documents(source)] == TEXTS


DAMAGES = [(suffix, damage) for suffix in ("gz", "zst") for damage in ("cut", "empty", "other")]


@pytest.mark.parametrize(("suffix", "damage"), [*DAMAGES, ("gz", "flipped")])
def test_a_damaged_compressed_file_is_named(tmp_path, suffix, damage):
    path = tmp_path / f"a.jsonl.{suffix}"
    compress(path, json.dumps({"text": TEXTS[2]}).encode())
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    path.write_bytes({"cut": content[:-9], "empty": b"", "flipped": content, "other": b"plain text"}[damage])
    for read in (lambda: list(read_rows(f"jsonl:{path}")), lambda: list(read_documents(f"text:{path}"))):
        with pytest.raises(
            ValueError, match=rf"^{path} is truncated or damaged \(.*\): download or compress it again$"
        ):
            read()


def test_a_compressed_document_is_not_unpacked_beyond_the_limit(tmp_path):
    compress(tmp_path / "bomb.txt.gz", b"0" * 10_000_000)
    with pytest.raises(ValueError, match=r"bomb\.txt\.gz has more than max_document_bytes=1,000 bytes of text"):
        list(read_documents(f"text:{tmp_path}/*", max_bytes=1000))


def test_other_errors_of_files_stay_theirs(tmp_path):
    (tmp_path / "a.jsonl.gz").mkdir()
    with pytest.raises(FileNotFoundError, match="no file matches"):
        list(read_rows(f"jsonl:{tmp_path}/*"))
