"""Records, lines and files that cannot be read are named, or skipped and counted by reason, whatever the source and the
format; the store is then that of the other records."""

import gzip
import json
import sys

import datasets
import pyarrow as pa
import pytest

from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.sources.row_sizes import RowLimit, Wanted
from ringformer.data.stores.options import StoreOptions
from tests.data.chat_samples import sentencepiece

NUMBER = 30


def turns(role, text, question="user", answer="assistant"):
    return lambda i: [{role: question, text: f"question {i}"}, {role: answer, text: f"answer {i}"}]


FORMATS = {
    "documents": (lambda i: {"text": f"text {i}", "w": 1.0}, {"text": "a", "w": -1.0}, "a wrong weight"),
    "sharegpt": (
        lambda i: {"conversations": turns("from", "value", "human", "gpt")(i)},
        {"conversations": turns("from", "value", "nobody", "gpt")(0)},
        "an unknown role",
    ),
    "messages": (
        lambda i: {"messages": turns("role", "content")(i)},
        {"messages": turns("role", "content", "nobody")(0)},
        "an unknown role",
    ),
    "alpaca": (
        lambda i: {"instruction": f"question {i}", "output": f"answer {i}"},
        {"instruction": "question", "output": ""},
        "another shape",
    ),
    "prompt": (
        lambda i: {"prompt": f"question {i}", "completion": f"answer {i}"},
        {"prompt": "", "completion": "answer"},
        "another shape",
    ),
    "tokens": (
        lambda i: {"input_ids": [i, 7], "labels": [-100, 7]},
        {"input_ids": [1, 999], "labels": [-100, 999]},
        "a token that the tokenizer lacks",
    ),
}
"""Of each format, records, one that cannot be read, and the reason."""


def write(kind, path, records):
    """Write the records as a source of a kind, and return its name."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.with_suffix(".gz").write_bytes(gzip.compress(lines.encode()))
        return f"jsonl:{path}.gz"
    elif kind == "json":
        path.write_text(json.dumps(records))
    elif kind == "arrow":
        table = pa.Table.from_pylist(records)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif kind == "parquet":
        datasets.Dataset.from_list(records).to_parquet(path)
    else:
        datasets.Dataset.from_list(records).save_to_disk(str(path))
    return f"{kind}:{path}"


def contents(stores):
    """Tokens, masks and ends of the documents of each store."""
    return [
        (store.tokens[:].tolist(), store.offsets.tolist(), None if store.mask is None else store.mask[:].tolist())
        for store in stores
    ]


def left_out(folder):
    return json.loads((folder / "report.json").read_text())["left_out"]


TABLES = ("parquet", "arrow", "datasets")
CELLS = [(form, kind) for form in FORMATS for kind in ("jsonl", "jsonl.gz", "json", *TABLES)]


USUAL = ("jsonl", "json", "parquet")


def cells():
    """Yield the formats and kinds of source that go together; some are slow, as each table is read by a process."""
    for form, kind in CELLS:
        if form != "tokens" or kind in TABLES:
            yield pytest.param(form, kind, marks=[] if kind in USUAL else pytest.mark.slow)


@pytest.mark.parametrize(("form", "kind"), list(cells()))
def test_a_record_that_cannot_be_read_is_named_or_skipped(tmp_path, kind, form, monkeypatch):
    monkeypatch.setattr("ringformer.data.stores.prepare.ENCODE_CHARACTERS", 50)  # groups of a few records
    monkeypatch.setattr(Wanted, "limit", RowLimit(sys.maxsize, 0, batch_bytes=300))
    make, bad, reason = FORMATS[form]
    good = [make(i) for i in range(NUMBER)]
    options = {"format": form, "held_out": 0.3, "clean": ""} | ({"weight_field": "w"} if form == "documents" else {})
    tokenizer = load_tokenizer("bytes")
    source = write(kind, tmp_path / "bad", [bad, *good[:9], bad, *good[9:], bad])
    with pytest.raises(ValueError, match=r"bad.*skip and count such records: --skip_malformed"):
        open_or_build(tmp_path / "s", StoreOptions(source, **options), tokenizer)
    skipping = StoreOptions(source, skip_malformed=True, **options)
    stores = open_or_build(tmp_path / "s", skipping, tokenizer)
    expected = open_or_build(tmp_path / "t", StoreOptions(write(kind, tmp_path / "good", good), **options), tokenizer)
    assert contents(stores) == contents(expected)
    assert all(store.meta["documents"] for store in stores)
    assert left_out(tmp_path / "s")[f"records skipped: {reason}"] == 3
    assert contents(open_or_build(tmp_path / "s", skipping, tokenizer)) == contents(expected)
    with pytest.raises(ValueError, match="skip_malformed is True, not False"):
        open_or_build(tmp_path / "s", StoreOptions(source, **options), tokenizer)


@pytest.mark.parametrize("form", ["documents", "messages"])
def test_lines_are_skipped_by_reason(tmp_path, form):
    make, _, _ = FORMATS[form]
    good = [json.dumps(make(i), ensure_ascii=False).encode() for i in range(6)]
    bad = {
        "not JSON": b'{"text": ',
        "not an object": b"[1]",
        "not utf-8": json.dumps(make("é"), ensure_ascii=False).encode("latin-1"),
        "not valid Unicode": json.dumps(make("\ud800")).encode(),
        "no field 'text'" if form == "documents" else "another shape": b'{"other": 1}',
    }
    lines = [b"", *good[:3], b"  ", *bad.values(), *good[3:], b"\t", b""]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    options = {"format": form, "held_out": 0.0, "skip_malformed": True}
    tokenizer = load_tokenizer(str(sentencepiece(tmp_path)))
    store, _ = open_or_build(tmp_path / "s", StoreOptions(f"jsonl:{tmp_path}/a.jsonl", **options), tokenizer)
    assert store.meta["documents"] == 6
    expected = {f"records skipped: {reason}": 1 for reason in bad} | {"blank lines skipped": 3}
    assert left_out(tmp_path / "s") == dict(sorted(expected.items()))


@pytest.mark.parametrize("form", ["documents", "messages"])
def test_blank_lines_are_no_records(tmp_path, form):
    make, _, _ = FORMATS[form]
    line = json.dumps(make(0))
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{line}\r\n\r\n{line}\n \n\n".encode())
    options = StoreOptions(f"jsonl:{tmp_path}/a.jsonl", format=form, held_out=0.0, clean="")
    store, _ = open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    assert store.meta["documents"] == 2
    assert left_out(tmp_path / "s") == {"blank lines skipped": 3}


def test_an_array_is_read_as_far_as_it_can_be(tmp_path):
    (tmp_path / "1.json").write_text('[{"text": "a"}, 7, {"text": "b"}, {"text"')
    (tmp_path / "2.json").write_text("{}")
    (tmp_path / "3.json").write_text('[{"text": "c"}]')
    options = StoreOptions(f"json:{tmp_path}/*.json", held_out=0.0, skip_malformed=True)
    store, _ = open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))
    assert store.tokens[:].tolist() == [ord("a"), 256, ord("b"), 256, ord("c"), 256]
    assert left_out(tmp_path / "s") == {
        "records skipped: not a JSON array": 1,
        "records skipped: not an object": 1,
        "records skipped: the rest of a JSON array, from a fault on": 1,
    }


def test_records_left_out_do_not_shift_the_choice_by_compressibility(tmp_path):
    """The source is read twice."""
    texts = ["ab " * 200, "a plain sentence of words", "".join(map(chr, range(200, 500))), "another sentence of words"]
    good, bad = [json.dumps({"text": text}) for text in texts], "no JSON"
    options = {"held_out": 0.0, "compressibility_tails": 0.25, "skip_malformed": True}
    stores = []
    for name, lines in (("good", good), ("bad", [bad, good[0], bad, bad, *good[1:]])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        options["source"] = f"jsonl:{tmp_path}/{name}.jsonl"
        stores.append(open_or_build(tmp_path / name, StoreOptions(**options), load_tokenizer("bytes"))[0])
    assert contents(stores[:1]) == contents(stores[1:])
    assert stores[0].meta["documents"] == 2
    assert left_out(tmp_path / "bad")["records skipped: not JSON"] == 3
