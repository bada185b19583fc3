"""Every source yields its documents in order, unchanged, or says what is wrong with which."""

import json
import os
import sysconfig
from pathlib import Path

import datasets
import pytest

from ringformer.data import Document, Documents, read_documents


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "deep").mkdir()
    (tmp_path / "b" / "deep" / "z.txt").write_bytes("zweite\r\nZeile é\n".encode())
    (tmp_path / "a.txt").write_bytes(b"first \xff byte")
    (tmp_path / "c.md").write_bytes(b"other")
    return tmp_path


def write_jsonl(path: Path, *records) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_stdlib_is_its_source_files_in_order():
    root = Path(sysconfig.get_path("stdlib"))
    documents = list(read_documents("stdlib"))
    names = [document.name for document in documents]
    assert len(names) > 300
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any({"site-packages", "test", "idlelib", "__pycache__"} & set(name.split("/")) for name in names)
    expected = 0
    for parent, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in ("site-packages", "test", "idlelib", "__pycache__")]
        expected += sum(f.endswith(".py") and (Path(parent) / f).stat().st_size > 0 for f in files)
    assert len(names) == expected
    text = {document.name: document.text for document in documents}["json/decoder.py"]
    assert text.encode() == (root / "json/decoder.py").read_bytes()


def test_stdlib_leaves_empty_files_out_and_counts_them():
    documents = read_documents("stdlib")
    assert all(document.text for document in documents)
    assert documents.skipped > 0


def test_text_files_are_read_byte_for_byte(folder):
    documents = list(read_documents(f"text:{folder}/**/*.txt"))
    assert [document.name for document in documents] == [f"{folder}/a.txt", f"{folder}/b/deep/z.txt"]
    assert documents[0].text.encode("utf-8", "surrogateescape") == b"first \xff byte"
    assert documents[1].text == "zweite\r\nZeile é\n"


def test_jsonl_reads_the_field_of_every_line(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", {"body": "a\nb", "id": 1}, {"body": "é"})
    write_jsonl(tmp_path / "2.jsonl", {"body": "c"})
    documents = list(read_documents(f"jsonl:{tmp_path}/*.jsonl", field="body"))
    assert documents == [
        Document("a\nb", f"{tmp_path}/1.jsonl:1"),
        Document("é", f"{tmp_path}/1.jsonl:2"),
        Document("c", f"{tmp_path}/2.jsonl:1"),
    ]


def test_a_saved_dataset_is_read(tmp_path):
    path = str(tmp_path / "saved")
    datasets.Dataset.from_dict({"body": ["one", "two"], "n": [1, 2]}).save_to_disk(path)
    documents = list(read_documents(f"datasets:{path}", field="body"))
    assert documents == [Document("one", f"{path}:0"), Document("two", f"{path}:1")]
    with pytest.raises(ValueError, match=r"no field .text.; it has: body, n"):
        list(read_documents(f"datasets:{path}"))
    with pytest.raises(ValueError, match=r":0: its field 'n' holds int, not text"):
        list(read_documents(f"datasets:{path}", field="n"))


def test_json_arrays_and_parquet_hold_documents_too(tmp_path):
    records = [{"body": "one", "n": 1}, {"body": "zwei é\n", "n": 2}]
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    for kind, lines in (("json", ("2 (record 1)", "6 (record 2)")), ("parquet", (0, 1))):
        documents = list(read_documents(f"{kind}:{tmp_path}/a.{kind}", field="body"))
        expected = zip(records, lines, strict=True)
        assert documents == [Document(r["body"], f"{tmp_path}/a.{kind}:{line}") for r, line in expected]
        with pytest.raises(ValueError, match=r"no field 'text'; it has: body, n"):
            list(read_documents(f"{kind}:{tmp_path}/a.{kind}"))
    (tmp_path / "b.json").write_text("[ ]")
    assert not list(read_documents(f"json:{tmp_path}/b.json"))
    (tmp_path / "b.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"b\.parquet is not a parquet file"):
        list(read_documents(f"parquet:{tmp_path}/b.parquet"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"text": "unfinished}', "the object that begins here is not JSON"),
        ("[" * 100_000, "the object that begins here is not JSON"),
        ('{"text": "a"} {}', "the object that begins here is followed by neither"),
        ("7", "holds a JSON int, not an object"),
        ('{"body": "x"}', "has no field 'text'"),
        ('{"text": 3}', "holds int, not text"),
        ('{"text": ""}', "is an empty document"),
    ],
)
def test_a_bad_record_of_an_array_in_one_line_is_named_by_its_number(tmp_path, bad, message):
    good = [json.dumps({"text": f"good, [,] {i}"}) for i in range(20)]
    (tmp_path / "bad.json").write_text("[" + ",".join([*good[:16], bad, *good[16:]]) + "]")
    with pytest.raises(ValueError, match=message) as caught:
        list(read_documents(f"json:{tmp_path}/bad.json"))
    assert f"{tmp_path}/bad.json:1 (record 17)" in str(caught.value)


def test_a_saved_dataset_with_splits_is_read(tmp_path):
    path = str(tmp_path / "saved")
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(path)
    assert [d.text for d in read_documents(f"datasets:{path}", split="test")] == ["test"]
    with pytest.raises(ValueError, match="no split 'dev'; it has: train, test"):
        list(read_documents(f"datasets:{path}", split="dev"))


def test_a_dataset_of_plain_files_is_loaded_by_name(tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    write_jsonl(tmp_path / "plain" / "train.jsonl", {"text": "from load_dataset"})
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: load_dataset(*a, cache_dir=tmp_path / "cache", **k))
    documents = list(read_documents(f"datasets:{tmp_path}/plain"))
    assert [document.text for document in documents] == ["from load_dataset"]


@pytest.mark.parametrize("source", ["csv:x", "text", "text:", "stdlib:", "", "/a/b.txt"])
def test_an_unknown_source_lists_the_known(source):
    with pytest.raises(
        ValueError,
        match=r"accepted: stdlib, installed, text:PATTERN, jsonl:PATTERN, json:PATTERN, parquet:PATTERN, arrow:",
    ):
        read_documents(source)


def test_a_pattern_without_files_is_refused(folder):
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\.rst'"):
        read_documents(f"text:{folder}/*.rst")
    with pytest.raises(
        FileNotFoundError, match=r"b/' of source .*: the folder has no file that ends in .jsonl or .ndjson"
    ):
        read_documents(f"jsonl:{folder}/b/")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "unfinished', "2 is not a line of JSON"),
        ('["a", "list"]', "2 holds a JSON list"),
        ({"body": "x", "id": 1}, "2: it has no field 'text'; it has: body, id"),
        ({}, "2: it has no field 'text'; it has: none"),
        ('{"text": null}', "2 is an empty document"),
        ({"text": ""}, r"2 is an empty document; --skip_empty \(for a run: --config.data.skip_empty=True\)"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write_jsonl(tmp_path / "x.jsonl", {"text": "good"}, line)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_documents(f"jsonl:{path}"))
    assert f"{path}:2" in str(caught.value)


def test_empty_files_and_rows_are_named_or_skipped(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=r"a\.txt is an empty document"):
        list(read_documents(f"text:{tmp_path}/*.txt"))
    datasets.Dataset.from_dict({"text": ["b", ""]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="saved:1 is an empty document"):
        list(read_documents(f"datasets:{tmp_path}/saved"))
    for source in (f"text:{tmp_path}/*.txt", f"datasets:{tmp_path}/saved"):
        documents = read_documents(source, skip_empty=True)
        assert [document.text for document in documents] == ["b"]
        assert documents.skipped == 1


def test_documents_count_anew_in_every_pass():
    documents = Documents([Document("", "a"), Document("b", "b")], skip_empty=True)
    for _ in range(2):
        assert [document.name for document in documents] == ["b"]
        assert documents.skipped == 1
