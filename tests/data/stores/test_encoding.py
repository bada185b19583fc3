"""Options of documents change a store: copies by weight, separators, Alpaca's questions."""

import json
import re

import numpy as np
import pytest

from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.stores.options import StoreOptions
from tests.data.chat_samples import sentencepiece


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"jsonl:{path}"


def texts(store, tokenizer):
    pairs = zip(store.offsets[:-1], store.offsets[1:], strict=True)
    return [tokenizer.decode(store.tokens[a:b]) for a, b in pairs]


@pytest.mark.parametrize("form", ["documents", "alpaca"])
def test_copies_by_weight(tmp_path, form):
    tokenizer, weights = load_tokenizer("bytes"), {"0": 0, "1": 1, "3": 3, "half": 0.5, "more": 2.25}
    records = [
        {"text": f"{name} {i}", "instruction": f"{name} {i}", "output": "answer", "w": weight}
        for i in range(400)
        for name, weight in weights.items()
    ]
    options = StoreOptions(written(tmp_path / "a.jsonl", records), held_out=0.3, format=form, weight_field="w")
    train, held = open_or_build(tmp_path / "s", options, tokenizer)
    assert not set(texts(train, tokenizer)) & set(texts(held, tokenizer)), "copies stay on one side"
    all_texts = texts(train, tokenizer) + texts(held, tokenizer)
    names, counts = np.unique([t.replace("USER: ", "").split("questions. ")[-1] for t in all_texts], return_counts=True)
    copies = {name: [] for name in weights}
    for name, count in zip(names, counts, strict=True):
        copies[name.split()[0]].append(int(count))
    assert set(copies["1"]) == {1} and set(copies["3"]) == {3} and copies["0"] == []
    assert len(copies["1"]) == len(copies["3"]) == 400
    assert set(copies["half"]) == {1} and 160 < len(copies["half"]) < 240
    assert set(copies["more"]) == {2, 3} and 60 < copies["more"].count(3) < 140
    added = json.loads((tmp_path / "s" / "report.json").read_text())["left_out"]
    assert added["copies added by weight"] == sum(max(count - 1, 0) for count in counts)
    kind = "documents" if form == "documents" else "conversations"
    assert added[f"{kind} dropped: by weight"] == 5 * 400 - len(counts)


@pytest.mark.parametrize("weight", [-1, "2", None, float("inf"), True, 1001, 1e300])
@pytest.mark.parametrize("form", ["documents", "alpaca"])
def test_a_wrong_weight_is_named(tmp_path, weight, form):
    records = [{"text": "a", "instruction": "a", "output": "b", "w": weight}]
    options = StoreOptions(written(tmp_path / "a.jsonl", records), format=form, weight_field="w")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the weight 'w' is .*; it must be a number from 0 to 1,000"):
        open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))


def test_a_record_without_the_weight_is_named(tmp_path):
    options = StoreOptions(written(tmp_path / "a.jsonl", [{"text": "a"}]), weight_field="w")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: it has no weight 'w'; it has: text"):
        open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))


def test_no_text_is_an_empty_document(tmp_path):
    source = written(tmp_path / "a.jsonl", [{"text": None}, {"text": "a"}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is an empty document"):
        open_or_build(tmp_path / "s", StoreOptions(source), load_tokenizer("bytes"))
    options = StoreOptions(source, skip_empty=True, held_out=0)
    assert open_or_build(tmp_path / "s", options, load_tokenizer("bytes"))[0].meta["documents"] == 1


@pytest.mark.parametrize("store", ["gs://mine/s", "s3://mine/s"])
def test_a_url_is_no_folder(tmp_path, store, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = written(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match="mine/s is no folder: mount the bucket, or write to a disk and copy it"):
        open_or_build(store, StoreOptions(source, held_out=0), load_tokenizer("bytes"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_files_of_text_have_no_weights(tmp_path):
    with pytest.raises(ValueError, match="weight_field='w' needs a source with records, not 'stdlib'"):
        open_or_build(tmp_path / "s", StoreOptions("stdlib", weight_field="w"), load_tokenizer("bytes"))


@pytest.mark.parametrize("separator", ["", "\n<s>\n"])
def test_documents_end_with_the_separator(tmp_path, separator):
    tokenizer = load_tokenizer(str(sentencepiece(tmp_path)))
    source = written(tmp_path / "a.jsonl", [{"text": f"The ring carries {i}."} for i in range(9)])
    store, _ = open_or_build(tmp_path / "s", StoreOptions(source, held_out=0, separator=separator), tokenizer)
    ids, end = store.tokens[:].tolist(), tokenizer.encode(separator) if separator else [tokenizer.eos_id]
    expected = [id_ for i in range(9) for id_ in [tokenizer.bos_id, *tokenizer.encode(f"The ring carries {i}."), *end]]
    assert ids == expected
    assert (tokenizer.eos_id in ids) == (not separator)
    assert store.meta["utf8_bytes"] == 9 * len("The ring carries 0.")


def test_other_options_make_another_store(tmp_path):
    source = written(tmp_path / "a.jsonl", [{"text": f"The ring carries {i}.", "w": 1} for i in range(9)])
    tokenizer, prints = load_tokenizer("bytes"), set()
    changes = {"": 0, "separator": "\n", "weight_field": "w", "retrieval_tasks": 2, "compressibility_tails": 0.2}
    for i, (key, value) in enumerate(changes.items()):
        options = StoreOptions(source, held_out=0, **({key: value} if key else {}))
        prints.add(open_or_build(tmp_path / f"{i}", options, tokenizer)[0].meta["fingerprint"])
        with pytest.raises(ValueError, match="split is 'train', not 'other'"):
            open_or_build(tmp_path / f"{i}", StoreOptions(source, split="other", held_out=0), tokenizer)
        if key:
            with pytest.raises(ValueError, match=re.escape(f"{key} is {value!r}, not ")):
                open_or_build(tmp_path / f"{i}", StoreOptions(source, held_out=0), tokenizer)
            with pytest.raises(ValueError, match=f"{key} is .*, not {re.escape(repr(value))}"):
                open_or_build(tmp_path / "0", options, tokenizer)
    assert len(prints) == len(changes)


def test_instructions_are_questions(tmp_path):
    records = [
        {"instruction": "Say hops.", "input": "", "output": "Hops."},
        {"instruction": "Count.", "input": "a ring of 8", "output": "7", "system": "Be short.", "id": 3},
    ]
    options = StoreOptions(written(tmp_path / "a.jsonl", records), held_out=0, format="alpaca")
    tokenizer = load_tokenizer("bytes")
    first, second = texts(open_or_build(tmp_path / "s", options, tokenizer)[0], tokenizer)
    assert first.endswith(" USER: Say hops. ASSISTANT: Hops.")
    assert second == "Be short. USER: Count.\n\na ring of 8 ASSISTANT: 7"
    for bad, message in (
        ({"instruction": "a"}, "no 'output' or 'response'; it has: instruction"),
        ({"instruction": "", "output": "b"}, "no 'instruction'"),
        ({"instruction": ["a"], "output": "b"}, "'instruction' is list, not text"),
    ):
        source = written(tmp_path / "b.jsonl", [bad])
        with pytest.raises(ValueError, match=rf"b\.jsonl:1: {message}"):
            open_or_build(tmp_path / "t", StoreOptions(source, format="alpaca"), tokenizer)
