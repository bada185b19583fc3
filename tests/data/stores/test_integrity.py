"""Not one changed bit, nor a file that is cut, gone, zeroed or another's, goes unnoticed; nor an edited store.json."""

import errno
import json
import os
import random
import threading
import time

import jax
import numpy as np
import pytest

from ringformer.data import Loader, TokenStore, build_stores, load_tokenizer, open_mixture, open_or_build
from ringformer.data.sources.documents import Document
from ringformer.data.stores import integrity
from ringformer.data.stores.checked_array import CheckedArray
from ringformer.data.stores.folder import open_one
from ringformer.data.stores.options import StoreOptions
from ringformer.data.tokenizers.byte_level import ByteTokenizer
from tests.data.chat_samples import chat, llama3
from tests.data.packing_samples import Lengths, build

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


class Prepared:
    """Two preparations of other chats, of which each test gets the first, whole."""

    def __init__(self, folder):
        self.tokenizer = load_tokenizer(str(llama3(folder / "tokenizer")))
        self.path, self.other = folder / "a", folder / "b"
        for path in (self.other, self.path):
            records = [{"messages": [m._asdict() for m in chat(f"{path.name} {i}?", "so " * i)]} for i in range(1, 60)]
            source = folder / f"{path.name}.jsonl"
            source.write_text("".join(json.dumps(record) + "\n" for record in records))
            self.options = StoreOptions(f"jsonl:{source}", format="messages", template="llama3", held_out=0.3)
            open_or_build(path, self.options, self.tokenizer)
        self.files = {p.relative_to(self.path).as_posix(): p for p in self.path.rglob("*") if p.is_file()}
        self.contents = {name: path.read_bytes() for name, path in self.files.items()}

    def open(self):
        """Open it as a run does, and wait for the verdict."""
        for store in open_or_build(self.path, self.options, self.tokenizer):
            store.check.wait()

    def restore(self):
        for name, path in self.files.items():
            path.write_bytes(self.contents[name])


@pytest.fixture(scope="module")
def all_prepared(tmp_path_factory):
    return Prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(params=["at once", "in the background"])
def prepared(all_prepared, request, monkeypatch):
    if request.param == "in the background":
        monkeypatch.setattr(integrity, "AT_ONCE", 0)
    all_prepared.restore()
    yield all_prepared
    all_prepared.restore()


def other_content(prepared, name):
    return (prepared.other / name).read_bytes()


DAMAGES = {
    "cut": lambda prepared, name: prepared.contents[name][: len(prepared.contents[name]) // 2],
    "a byte short": lambda prepared, name: prepared.contents[name][:-1],
    "a byte long": lambda prepared, name: prepared.contents[name] + b"\n",
    "empty": lambda prepared, name: b"",
    "zeroed": lambda prepared, name: bytes(len(prepared.contents[name])),
    "its end zeroed": lambda prepared, name: prepared.contents[name][:-9] + bytes(9),
    "another's": other_content,
    "gone": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_is_missed(prepared, damage):
    prepared.open()
    assert {"train/tokens.bin", "eval/mask.bin", "tokenizer/tokenizer.json", "manifest.json"} < prepared.files.keys()
    silent = []
    for name, path in prepared.files.items():
        if damage == "gone":
            path.unlink()
        elif (content := DAMAGES[damage](prepared, name)) == prepared.contents[name]:
            assert damage == "another's" and name.startswith("tokenizer/")  # both have the same
            continue
        elif name == "manifest.json" and content.strip() == prepared.contents[name].strip():
            continue  # a line's end: it says the same
        else:
            path.write_bytes(content)
        try:
            prepared.open()
            silent.append(name)
        except (ValueError, FileNotFoundError) as error:
            # Another's store.json and manifest are whole: what they list is not there.
            whole = damage == "another's" and path.suffix == ".json"
            assert str(prepared.path if whole else path.parent) in str(error) and (whole or path.name in str(error))
        prepared.restore()
    assert not silent


def test_a_hundred_flipped_bits(prepared):
    """Spread over all files alike, the small ones and the large."""
    rng, silent = random.Random(0), []
    for flip in range(100):
        name = sorted(prepared.files)[flip % len(prepared.files)]
        content = bytearray(prepared.contents[name])
        place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        content[place] ^= bit
        prepared.files[name].write_bytes(content)
        try:
            prepared.open()
            silent.append((name, place, bit))
        except (ValueError, FileNotFoundError) as error:
            assert str(prepared.path) in str(error)
        prepared.restore()
    assert not silent


@pytest.mark.parametrize("key", ["fingerprint", "tokenizer", "vocab_size", "largest_id", "settings", "tokens", "files"])
def test_an_edited_store_json_is_refused(prepared, key):
    path = prepared.files["train/store.json"]
    meta = json.loads(path.read_text())
    changed = {str: lambda x: x[::-1], int: lambda x: x + 1, dict: lambda x: dict(list(x.items())[1:])}
    path.write_text(json.dumps(meta | {key: changed[type(meta[key])](meta[key])}))
    with pytest.raises(ValueError, match=r"train/store\.json was edited or damaged"):
        TokenStore(path.parent)
    path.write_text(json.dumps(meta))  # otherwise laid out: the same for a store, not for its folder
    assert TokenStore(path.parent).meta | {"checksum": meta["checksum"]} == meta
    with pytest.raises(ValueError, match=r"train/store\.json (has \d+ bytes, \d+ were|is not what was) written"):
        prepared.open()


def test_swapped_stores_are_noticed_by_all_who_open_them(prepared):
    train, held, kept = (prepared.path / name for name in ("train", "eval", "kept"))
    openings = (
        prepared.open,
        lambda: open_mixture(f"{prepared.path}:1", prepared.tokenizer.name, held_out=True),
        lambda: open_one(prepared.path, ("eval",)),
        lambda: open_one(train, ()),
    )
    for opening in openings:
        opening()
    assert open_one(prepared.path, ("eval", "train")).path == held
    for swapped in (True, False):
        for name, other in ((train, kept), (held, train), (kept, held)):
            name.rename(other)
        for opening in openings if swapped else ():
            with pytest.raises(ValueError, match=r"store\.json is not what was written"):
                opening()
    prepared.open()


class Slow:
    """The verification of arrays, which begins when it is let go."""

    def __init__(self, monkeypatch):
        self.go, real = threading.Event(), CheckedArray.whole_hash
        monkeypatch.setattr(integrity, "AT_ONCE", 0)
        monkeypatch.setattr(CheckedArray, "whole_hash", lambda array: self.go.wait(60) and real(array))


def test_a_large_store_is_read_before_the_verdict_and_no_longer_after_it(tmp_path, monkeypatch):
    path = build(tmp_path / "s", [60] * 9).path
    content = bytearray((path / "tokens.bin").read_bytes())
    content[7] ^= 1
    (path / "tokens.bin").write_bytes(content)
    build(tmp_path / "whole", [60] * 9)
    slow = Slow(monkeypatch)
    store, whole = TokenStore(path), TokenStore(tmp_path / "whole" / "train")
    loader = Loader([(whole, 1), (store, 1)], batch_size=1, seq_len=8, seed=0, layout="contiguous", ring_size=1)
    batches = loader.iterate(0, SHARDING)
    for _ in range(5):
        next(batches)
    assert store.check.pending
    slow.go.set()
    with pytest.raises(ValueError, match=r"train/tokens\.bin is not what was written, by its hash"):
        store.check.wait()
    with pytest.raises(ValueError, match=r"train/tokens\.bin is not what was written"):
        next(batches)
    with pytest.raises(ValueError, match=r"train/tokens\.bin is not what was written"):
        loader.batch(0, SHARDING)  # as evaluations do
    whole.check.wait()


def test_a_file_that_can_no_longer_be_read_is_named(tmp_path, monkeypatch):
    path = build(tmp_path / "s", [60] * 9).path
    slow, said = Slow(monkeypatch), []
    store = TokenStore(path)

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    threading.Timer(0.2, slow.go.set).start()
    with pytest.raises(ValueError, match=r"train/tokens\.bin cannot be read \(Input/output error"):
        store.check.wait(said.append)
    assert said == [f"waiting until the contents of {path} are verified"]


@pytest.mark.slow
def test_hashing_leaves_the_interpreter_to_others(tmp_path, monkeypatch):
    """A step's Python must not wait for a store's verdict: the hash is computed without the interpreter's lock."""
    monkeypatch.setattr(integrity, "AT_ONCE", 0)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**30)
    check = integrity.ContentCheck(tmp_path, {CheckedArray(tmp_path / "large", np.dtype(np.uint16)): ""})
    longest, last = 0.0, time.perf_counter()
    while check.pending:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < 0.2
    with pytest.raises(ValueError, match="large is not what was written"):
        check.raise_if_failed()


def test_ids_beyond_a_vocabulary_are_refused(tmp_path):
    store = build(tmp_path / "s", [60] * 9)
    largest = int(np.max(store.tokens))
    assert store.meta["largest_id"] == largest
    store.check_ids(largest + 1)
    with pytest.raises(ValueError, match=rf"has the token id {largest}, beyond the model's vocabulary of {largest};"):
        store.check_ids(largest)

    class Wrong(ByteTokenizer):
        def encode_batch(self, texts):
            return [np.array([made]) for _ in texts]

    for made in (257, 2**16 + 1, -1):  # the second would fit into 16 bits, as another
        with pytest.raises(
            ValueError, match=f"tokenizer bytes made the id {made} of document 0; its vocabulary has 257"
        ):
            build_stores(tmp_path / "t", [Document("text", "a")], Wrong(), held_out=0)
    assert Lengths.vocab_size == 257 and not (tmp_path / "t").exists()
