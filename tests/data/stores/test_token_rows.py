"""Rows of tokens become the store that their text would; masks, padding and faults are those of the columns."""

import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringformer.data import TokenStore, load_tokenizer, open_or_build
from ringformer.data.stores.options import StoreOptions
from tests.data.chat_samples import CORPUS, llama3, sentencepiece

TEXTS = [f"{text} Number {i}: naïve ☃." for i, text in enumerate(CORPUS)]


@pytest.fixture(scope="module", params=["bytes", "tokenizer.json", "sentencepiece"])
def spec(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return {"bytes": lambda f: "bytes", "tokenizer.json": llama3, "sentencepiece": sentencepiece}[request.param](folder)


def table(path, **columns):
    pq.write_table(pa.table(columns), path)
    return f"parquet:{path}"


def prepared(path, source, spec="bytes", **options) -> TokenStore:
    options = {"held_out": 0.0, "format": "tokens", "tokenizer": str(spec)} | options
    return open_or_build(path, StoreOptions(source, **options), load_tokenizer(str(spec)))[0]


def test_tokens_are_those_of_the_text(tmp_path, spec):
    tokenizer = load_tokenizer(str(spec))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    of_text = prepared(tmp_path / "text", f"jsonl:{tmp_path}/a.jsonl", spec, format="documents")
    begin = [tokenizer.bos_id] if tokenizer.begins else []
    ids = [[*begin, *ids.tolist()] for ids in tokenizer.encode_batch(TEXTS)]
    ids = [row + [tokenizer.eos_id] * (i % 2) for i, row in enumerate(ids)]
    store = prepared(tmp_path / "tokens", table(tmp_path / "a.parquet", input_ids=ids), spec)
    assert np.array_equal(store.tokens[:], of_text.tokens[:]) and np.array_equal(store.offsets, of_text.offsets)
    assert store.mask is None
    assert store.meta["utf8_bytes"] == of_text.meta["utf8_bytes"]
    report = json.loads((tmp_path / "tokens" / "report.json").read_text())
    assert report["left_out"] == {"end tokens added to rows without one": len(TEXTS) // 2}


ROWS = {"input_ids": [[1, 2, 3, 256], [4, 5], [6, 256]]}
KEPT = [True, False, True, True, False, True, True, True, False]


@pytest.mark.parametrize("column", ["labels", "assistant_masks", "completion_mask", "loss_mask"])
@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int8()), pa.list_(pa.int32())])
def test_masks(tmp_path, column, kind):
    labels = [[1, -100, 3, 256], [-100, 5], [6, -100]]
    masks = [[int(label != -100) for label in row] for row in labels]
    values = pa.array(labels if column == "labels" else masks, pa.list_(pa.int64()) if column == "labels" else kind)
    store = prepared(tmp_path / "s", table(tmp_path / "a.parquet", **ROWS, **{column: values}))
    assert store.tokens[:].tolist() == [1, 2, 3, 256, 4, 5, 256, 6, 256]
    assert store.mask[:].astype(bool).tolist() == KEPT
    assert store.meta["utf8_bytes"] == 4, "of the bytes that are trained on; the end has none"


def test_labels_that_are_all_tokens_need_no_mask(tmp_path):
    store = prepared(tmp_path / "s", table(tmp_path / "a.parquet", **ROWS, labels=ROWS["input_ids"]))
    assert store.mask is None and store.meta["trained_tokens"] == store.meta["tokens"] == 9
    assert not (tmp_path / "s" / "train" / "mask.bin").exists()


def test_padding_is_left_out(tmp_path):
    ids = [[0, 0, 7, 8], [9, 256, 0, 0], [1, 2, 3, 4]]
    source = table(
        tmp_path / "a.parquet",
        input_ids=pa.array(ids, pa.list_(pa.int64(), 4)),
        attention_mask=[[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]],
        loss_mask=[[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]],
    )
    store = prepared(tmp_path / "s", source)
    assert store.tokens[:].tolist() == [7, 8, 256, 9, 256, 1, 2, 3, 4, 256]
    assert store.mask[:].tolist() == [0, 1, 1, 1, 1, 0, 0, 0, 1, 1]


BAD = [
    ({"text": ["a"]}, "has no column 'input_ids'; it has: text"),
    ({"input_ids": ["a"]}, "column 'input_ids' of .* holds string, not lists of whole numbers"),
    ({"input_ids": [[1.5]]}, "column 'input_ids' of .* holds list<.*double>, not lists of whole numbers"),
    ({"input_ids": [[1], None]}, "column 'input_ids' of .*:1 has missing values"),
    ({"input_ids": [[1], [2, None]]}, "column 'input_ids' of .*:1 has missing values"),
    ({"input_ids": [[1], [2**40]]}, "column 'input_ids' of .*, from row 0: Integer value 1099511627776 not in range"),
    ({"input_ids": [[1]], "loss_mask": [[1]], "completion_mask": [[0]]}, "has completion_mask and loss_mask: keep"),
    (
        {"input_ids": [[1], [2, 257]]},
        ".*:1 has a token beyond the 257 of tokenizer bytes: name the one that made it with --tokenizer",
    ),
    ({"input_ids": [[1], [-1]]}, ".*:1 has a token beyond the 257"),
    ({"input_ids": [[1], []]}, ".*:1 has no token; --skip_empty .* skips"),
    ({"input_ids": [[1], [2, 3]], "labels": [[1], [3]]}, ".*:1 has 2 input_ids and 1 labels"),
    ({"input_ids": [[1], [2, 3]], "labels": [[1], [3, 256]]}, "labels of .*:1 are neither its input_ids nor -100;"),
    (
        {"input_ids": [[1], [2, 3]], "labels": [[-100], [-100, -100]]},
        "none of the 5 tokens of the train store's rows .* labels or masks",
    ),
]


@pytest.mark.parametrize(("columns", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_wrong_column_is_named_and_nothing_is_written(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path / "s", table(tmp_path / "a.parquet", **columns))
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_empty_rows_are_skipped_if_asked(tmp_path):
    source = table(tmp_path / "a.parquet", input_ids=[[1], [], [2]])
    store = prepared(tmp_path / "s", source, skip_empty=True)
    assert store.tokens[:].tolist() == [1, 256, 2, 256] and store.meta["skipped_empty"] == 1


def test_only_tables_have_tokens(tmp_path):
    with pytest.raises(ValueError, match="format tokens reads tables, parquet:PATTERN, arrow:PATTERN, datasets"):
        prepared(tmp_path / "s", "jsonl:a.jsonl")


def test_five_million_tokens_a_second(tmp_path):
    """Prepare documents of a thousand tokens, from the file to the verified store. The median of three runs counts, in
    CPU-seconds of this process, because the machine may be busy."""
    rng = np.random.default_rng(0)
    ids = pa.array(rng.integers(0, 256, 8_000_000, dtype=np.int32))
    rows = pa.ListArray.from_arrays(pa.array(np.arange(0, 8_000_001, 1000, dtype=np.int32)), ids)
    source = table(tmp_path / "a.parquet", input_ids=rows, labels=rows)
    seconds = []
    for i in range(3):
        start = time.process_time()
        prepared(tmp_path / f"s{i}", source)
        seconds.append(time.process_time() - start)
    assert sorted(seconds)[1] < 8e6 / 5e6, seconds


def test_a_column_twice_is_named(tmp_path):
    column = pa.array([[1, 2]])
    pq.write_table(pa.Table.from_arrays([column, column], ["input_ids", "input_ids"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has 2 columns 'input_ids': rename all but one"):
        prepared(tmp_path / "s", f"parquet:{tmp_path}/a.parquet")


def test_masks_are_part_of_the_fingerprint_and_not_of_the_split(tmp_path):
    ids = [[i % 250, i // 250, 3] for i in range(400)]
    prints, held = set(), set()
    for i, kept in enumerate((0, 1, 2)):
        mask = [[int(j == kept) for j in range(3)] for _ in ids]
        source = table(tmp_path / f"{i}.parquet", input_ids=ids, loss_mask=mask)
        store = prepared(tmp_path / f"s{i}", source, held_out=0.3)
        prints.add(store.meta["fingerprint"])
        held.add(store.tokens[:].tobytes())
    assert len(prints) == 3 and len(held) == 1
