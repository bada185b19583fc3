"""A store holds its documents exactly, splits them by their text alone, and is there whole or not at all."""

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ringformer.data import (
    ByteTokenizer,
    Document,
    DocumentStream,
    TokenStore,
    WholeDocuments,
    build_stores,
    load_tokenizer,
    open_or_build,
    train_sentencepiece,
)
from ringformer.data.stores import integrity
from ringformer.data.stores.options import StoreOptions
from ringformer.data.stores.token_store import StoreWriter
from tests.data.packing_samples import with_mask

TEXTS = ["é" * (i % 7 + 1) + str(i) for i in range(200)]
DOCUMENTS = [Document(text, f"doc {i}") for i, text in enumerate(TEXTS)]


class LargeVocabulary(ByteTokenizer):
    """Bytes moved up to ids that need 32 bits."""

    name, vocab_size, eos_id = "large", 2**16 + 1, 2**16

    def encode_batch(self, texts):
        return [ids.astype(np.int64) + 65_000 for ids in super().encode_batch(texts)]


def texts_of(store):
    tokens, offsets = store.tokens, store.offsets
    pieces = [tokens[a:b] for a, b in itertools.pairwise(offsets)]
    assert all(piece[-1] == 256 for piece in pieces)
    return [bytes(piece[:-1].tolist()).decode() for piece in pieces]


def test_documents_come_back_and_every_one_once(tmp_path):
    train, held = build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    assert sorted(texts_of(train) + texts_of(held)) == sorted(TEXTS)
    assert [t for t in TEXTS if t in set(texts_of(train))] == texts_of(train), "order is kept"
    assert 0.1 < len(texts_of(held)) / len(TEXTS) < 0.3
    for store in (train, held):
        texts = texts_of(store)
        assert store.mask is None
        assert store.offsets.dtype == np.int64
        assert store.tokens.dtype == np.uint16
        assert store.meta["documents"] == len(texts)
        assert store.meta["utf8_bytes"] == sum(len(text.encode()) for text in texts)
        assert store.meta["tokens"] == store.meta["utf8_bytes"] + len(texts) == len(store.tokens)
        assert (store.meta["tokenizer"], store.meta["vocab_size"], store.meta["dtype"]) == ("bytes", 257, "<u2")
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def test_the_split_depends_on_the_text_alone(tmp_path):
    _, held = build_stores(tmp_path / "a", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    shuffled = [Document(text, "x") for text in reversed(TEXTS + ["more"] * 3)]
    train, again = build_stores(tmp_path / "b", shuffled, ByteTokenizer(), held_out=0.2)
    assert set(texts_of(again)) - {"more"} == set(texts_of(held))
    assert not set(texts_of(again)) & set(texts_of(train))
    _, larger = build_stores(tmp_path / "c", DOCUMENTS, ByteTokenizer(), held_out=0.5)
    assert set(texts_of(held)) < set(texts_of(larger))


def test_nothing_held_out_makes_no_eval_store(tmp_path):
    train, held = build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    assert held is None
    assert texts_of(train) == TEXTS
    assert not (tmp_path / "s" / "eval").exists()


def test_tokens_are_32_bit_when_the_vocabulary_asks_for_it(tmp_path):
    store, _ = build_stores(tmp_path / "s", [Document("\xff", "a")], LargeVocabulary(), held_out=0)
    assert store.tokens.dtype == np.uint32
    assert store.tokens[:].tolist() == [65_000 + 0xC3, 65_000 + 0xBF, 2**16]


@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_store_without_a_token_to_train_on_is_refused(tmp_path, name):
    """When it is built, held out or not; and when it is packed, should it come from elsewhere."""
    for trained in (0, 1, 2):
        (tmp_path / str(trained)).mkdir()
        writer = StoreWriter(tmp_path / str(trained) / name, ByteTokenizer(), {})
        writer.add(np.arange(4), np.arange(4) < 2 * trained, 2 * trained, b"a document")
        if trained == 1:  # the answer alone, as it should be
            writer.finish(skipped_empty=0, settings={})
            continue
        what = "all" if trained else "none"
        with pytest.raises(ValueError, match=f"{what} of the 4 tokens of the {name} store's conversations would be"):
            writer.finish(skipped_empty=0, settings={})
    store = TokenStore(tmp_path / "1" / name)
    assert DocumentStream(store, 3, 0).bytes_per_token == 1
    store.meta["trained_tokens"] = 0
    for packed in (DocumentStream, partial(WholeDocuments, batch_size=1)):
        with pytest.raises(ValueError, match=f"{name} has no token to train on"):
            packed(store, 3, 0)


def test_sentencepiece_stores_decode(tmp_path):
    train_sentencepiece(TEXTS, tmp_path / "t.model", vocab_size=300)
    tokenizer = load_tokenizer(str(tmp_path / "t.model"))
    store, _ = build_stores(tmp_path / "s", DOCUMENTS, tokenizer, held_out=0)
    assert [tokenizer.decode(store.tokens[a:b]) for a, b in itertools.pairwise(store.offsets)] == TEXTS
    assert (store.tokens[:][store.offsets[1:] - 1] == tokenizer.eos_id).all()


def test_groups_for_the_tokenizer_change_nothing(tmp_path, monkeypatch):
    one, _ = build_stores(tmp_path / "a", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    monkeypatch.setattr("ringformer.data.stores.prepare.ENCODE_CHARACTERS", 10)
    two, _ = build_stores(tmp_path / "b", DOCUMENTS, ByteTokenizer(), held_out=0.2)
    assert one.meta == two.meta
    assert np.array_equal(one.tokens, two.tokens)


def test_the_fingerprint_follows_the_content(tmp_path):
    def fingerprint(documents, tokenizer, held_out):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return build_stores(path, documents, tokenizer, held_out=held_out)[0].meta["fingerprint"]

    base = fingerprint(DOCUMENTS, ByteTokenizer(), 0)
    assert fingerprint([Document(d.text, "renamed") for d in DOCUMENTS], ByteTokenizer(), 0) == base
    others = [
        fingerprint(DOCUMENTS[::-1], ByteTokenizer(), 0),
        fingerprint(DOCUMENTS[:-1], ByteTokenizer(), 0),
        fingerprint(DOCUMENTS, LargeVocabulary(), 0),
        fingerprint(DOCUMENTS, ByteTokenizer(), 0.01),
    ]
    assert len({base, *others}) == len(others) + 1


def test_a_mask_beside_the_tokens_is_read(tmp_path):
    store, _ = build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    mask = np.arange(len(store.tokens), dtype=np.uint8) % 2
    assert np.array_equal(with_mask(store, mask).mask, mask)
    mask.tofile(store.path / "mask.bin")
    with pytest.raises(ValueError, match=r"mask\.bin does not belong to the store, which has no mask"):
        TokenStore(store.path)


def test_an_interrupted_build_leaves_nothing(tmp_path):
    def documents():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_stores(tmp_path / "s", documents(), ByteTokenizer(), held_out=0.2)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_build_is_no_store(tmp_path):
    seen = []

    def documents():
        yield from DOCUMENTS
        seen.extend(tmp_path.rglob("*"))

    build_stores(tmp_path / "s", documents(), ByteTokenizer(), held_out=0.2)
    unfinished = [path for path in seen if path.name == "train"]
    assert unfinished
    assert not any(path.name == "store.json" or path == tmp_path / "s" for path in seen)


def test_a_folder_that_is_no_store_says_how_to_build_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no token store at .*ringformer data prepare"):
        TokenStore(tmp_path / "none")
    (tmp_path / "tokens.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"unfinished token store .*ringformer data prepare"):
        TokenStore(tmp_path)


def test_a_damaged_store_is_refused(tmp_path, monkeypatch):
    store, _ = build_stores(tmp_path / "s", DOCUMENTS, ByteTokenizer(), held_out=0)
    tokens = (store.path / "tokens.bin").read_bytes()
    (store.path / "tokens.bin").write_bytes(tokens[:-2])
    with pytest.raises(ValueError, match=rf"tokens\.bin has {len(tokens) - 2} bytes, {len(tokens)} were written"):
        TokenStore(store.path)
    (store.path / "tokens.bin").write_bytes(tokens)
    np.save(store.path / "offsets.npy", store.offsets + 1)
    with pytest.raises(ValueError, match=r"offsets\.npy is not what was written"):
        TokenStore(store.path)
    monkeypatch.setattr(integrity, "AT_ONCE", 0)  # it is read at once in any store: the others hang on it
    with pytest.raises(ValueError, match=r"offsets\.npy is not what was written"):
        TokenStore(store.path)
    for version in (2, 99):  # older and newer
        (store.path / "store.json").write_text(json.dumps(store.meta | {"format": version}))
        with pytest.raises(ValueError, match=f"store format {version}, but this version reads 3: build the store"):
            TokenStore(store.path)


def test_a_split_without_documents_is_an_error(tmp_path):
    one = [Document("only", "only")]
    with pytest.raises(ValueError, match="the eval store would be empty: of 1 documents, held_out=1e-09"):
        build_stores(tmp_path / "s", one, ByteTokenizer(), held_out=1e-9)
    with pytest.raises(ValueError, match=r"the train store would be empty: of 1 documents, held_out=0\.99999999"):
        build_stores(tmp_path / "s", one, ByteTokenizer(), held_out=0.99999999)
    with pytest.raises(ValueError, match=r"the train store would be empty: .*the source has none"):
        build_stores(tmp_path / "s", [], ByteTokenizer(), held_out=0)
    with pytest.raises(ValueError, match=r"held_out=1 is not in \[0, 1\)"):
        build_stores(tmp_path / "s", one, ByteTokenizer(), held_out=1)
    assert not list(tmp_path.iterdir())


def test_text_that_cannot_be_encoded_is_named(tmp_path):
    train_sentencepiece(TEXTS, tmp_path / "t.model", vocab_size=300)
    escaped = [*DOCUMENTS, Document("\udcff", "bad one")]
    with pytest.raises(ValueError, match="bad one is not UTF-8, which tokenizer sentencepiece-"):
        build_stores(tmp_path / "s", escaped, load_tokenizer(str(tmp_path / "t.model")), held_out=0)
    store, _ = build_stores(tmp_path / "s", escaped, ByteTokenizer(), held_out=0)
    assert store.tokens[-2:].tolist() == [0xFF, 256]
    with pytest.raises(ValueError, match="bad one cannot be written as UTF-8"):
        build_stores(tmp_path / "r", [Document("\ud800", "bad one")], ByteTokenizer(), held_out=0)


def test_a_directory_in_use_is_not_touched(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        build_stores(tmp_path, DOCUMENTS, ByteTokenizer(), held_out=0)
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


@pytest.fixture
def options(tmp_path):
    with (tmp_path / "d.jsonl").open("w") as lines:
        for text in [*TEXTS, "", ""]:
            lines.write(json.dumps({"body": text}) + "\n")
    return StoreOptions(f"jsonl:{tmp_path}/d.jsonl", field="body", held_out=0.2, skip_empty=True)


def test_open_or_build_builds_once(tmp_path, options):
    built = open_or_build(tmp_path / "s", options, ByteTokenizer())
    assert built[0].meta["skipped_empty"] == 2
    assert built[0].meta["settings"] == {
        "source": options.source,
        "field": "body",
        "split": "train",
        "skip_empty": True,
        "format": "documents",
        "weight_field": "",
        "begin": False,
        "separator": "",
        "join": "",
        "compressibility_tails": 0.0,
        "retrieval_tasks": 0,
        "encoding": "",
        "clean": "",
        "skip_malformed": False,
        "tokenizer": "bytes",
        "held_out": 0.2,
    }
    (tmp_path / "d.jsonl").unlink()
    opened = open_or_build(tmp_path / "s", options, ByteTokenizer())
    for a, b in zip(built, opened, strict=True):
        assert a.meta == b.meta
        assert np.array_equal(a.tokens, b.tokens)


def test_open_or_build_without_held_out_documents(tmp_path, options):
    for _ in range(2):
        train, held = open_or_build(tmp_path / "s", replace(options, held_out=0.0), ByteTokenizer())
        assert train.meta["documents"] == len(TEXTS)
        assert held is None


@pytest.mark.parametrize(
    ("key", "other", "message"),
    [
        ("source", "stdlib", "source is 'jsonl:.*', not 'stdlib'"),
        ("field", "text", "field is 'body', not 'text'"),
        ("split", "test", "split is 'train', not 'test'"),
        ("held_out", 0.1, "held_out is 0.2, not 0.1"),
        ("skip_empty", False, "skip_empty is True, not False"),
        ("tokenizer", "large", "tokenizer is 'bytes', not 'large'"),
    ],
)
def test_other_options_are_refused(tmp_path, options, key, other, message):
    open_or_build(tmp_path / "s", options, ByteTokenizer())
    tokenizer = LargeVocabulary() if other == "large" else ByteTokenizer()
    with pytest.raises(ValueError, match=f"{message}. To use them, set the same options") as caught:
        open_or_build(tmp_path / "s", replace(options, **{key: other}), tokenizer)
    assert str(caught.value).count(", not ") == 1, "only what differs is named"


def test_a_source_without_files_is_not_mistaken_for_a_faster_process(tmp_path, options):
    with pytest.raises(FileNotFoundError, match="no file matches"):
        open_or_build(tmp_path / "s", replace(options, source=f"text:{tmp_path}/none/*"), ByteTokenizer())


def test_of_two_processes_building_the_same_the_faster_is_used(tmp_path, options, monkeypatch):
    def overtaken(directory, *args, **kwargs):
        build_stores(directory, *args, **kwargs)
        return build_stores(directory, *args, **kwargs)

    monkeypatch.setattr("ringformer.data.stores.prepare.build_stores", overtaken)
    train, _ = open_or_build(tmp_path / "s", options, ByteTokenizer())
    assert train.meta["documents"] > 100
    assert not [path for path in tmp_path.iterdir() if "building" in path.name]
