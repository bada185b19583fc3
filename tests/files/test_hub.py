"""Models, tokenizers and datasets of the hub, against its protocol on this machine; what is not there is one line."""

import json
import os
import shutil
import time

import pytest
from huggingface_hub import constants, snapshot_download

from ringformer.cli import main
from ringformer.data import load_tokenizer
from ringformer.files import hub as hub_module
from ringformer.files.hub import on_hub
from tests.convert.families import save_tiny
from tests.files.hub_stub import COMMIT, broken, served

SNAPSHOT_AND_FOLDER = [pytest.param(place, marks=pytest.mark.slow) for place in ("snapshot", "local_dir")]
CLOSED = "http://127.0.0.1:9"


RESOLVED = "{}/{{repo_id}}/resolve/{{revision}}/{{filename}}"


@pytest.fixture(scope="module")
def hub_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    save_tiny("qwen3", root / "local" / "qwen3")
    (root / "local" / "qwen3" / "pickle.bin").write_bytes(b"not downloaded")
    rows = [{"text": f"{i} keys and values travel around the ring"} for i in range(30)]
    (root / "local" / "test").mkdir()
    (root / "local" / "test" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture(scope="module")
def hub(hub_root):
    with served(hub_root) as endpoint:
        yield endpoint


@pytest.fixture
def cached(hub, tmp_path, monkeypatch):
    """A cache of its own; `huggingface_hub` reads the environment once, when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", RESOLVED.format(hub))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_model_and_a_dataset(cached, tmp_path, monkeypatch):
    """Downloaded once; then also offline. The converted model records the commit."""
    for number, name in enumerate(("hf://local/qwen3", "local/qwen3")):
        out = tmp_path / str(number)
        assert main(["convert", "from-hf", name, str(out)]) == 0
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert json.loads((out / "config.json").read_text())["origin"] == f"hf://local/qwen3@{COMMIT}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    there = [path.name for path in cached.rglob("snapshots/*/*")]
    assert "model.safetensors" in there and "pickle.bin" not in there
    for source in ("hf://local/test", "datasets:local/test"):
        store = tmp_path / source.partition(":")[0]
        words = [f"--source={source}", f"--store={store}", "--tokenizer=bytes", "--held_out=0"]
        assert main(["data", "prepare", *words]) == 0
        made = json.loads((store / "train" / "store.json").read_text())
        assert (made["documents"], made["settings"]["snapshot"]) == (30, f"hf://local/test@{COMMIT}")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hf://local/qwen4", {}, "hf://local/qwen4: the hub has no such model; for a private one, set HF_TOKEN"),
        ("local/qwen4", {}, "local/qwen4: there is no such folder, and the hub has no such model"),
        ("hf://local/qwen3@v2", {}, "the hub's local/qwen3 has no revision 'v2'"),
        ("hf://local/gated", {}, "/local/gated, and set HF_TOKEN to a token of yours"),
        ("local/qwen3", {"ENDPOINT": CLOSED}, f"it is not in the cache of the hub, and {CLOSED} cannot be reached"),
        ("local/qwen3", {"HF_HUB_OFFLINE": True}, "it is not in the cache of the hub, and HF_HUB_OFFLINE is set"),
        ("hf://qwen3", {}, "hf://qwen3 names no repository of the hub: write hf://ORGANISATION/NAME"),
    ],
    ids=["mistyped", "mistyped folder", "revision", "gated", "no connection", "offline", "no organisation"],
)
def test_what_is_not_there_is_one_line(cached, tmp_path, monkeypatch, capsys, name, changes, message):
    """Within two seconds, and nothing is written."""
    for constant, value in changes.items():
        monkeypatch.setattr(constants, constant, value)
    began = time.monotonic()
    assert main(["convert", "from-hf", name, str(tmp_path / "out")]) == 2
    assert time.monotonic() - began < 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


FAILURES = {
    "silent": "does not answer within 1 seconds",
    "closed": "does not answer as a hub does (RemoteProtocolError: ",
    "cut": "does not answer as a hub does (RemoteProtocolError: ",
    "huge headers": "does not answer as a hub does (RemoteProtocolError: ",
    "not JSON": "does not answer as a hub does (JSONDecodeError: ",
    "a login page": "does not answer as a hub does (JSONDecodeError: ",
    "another object": "does not answer as a hub does (TypeError: ",
    "a loop": "does not answer as a hub does (TooManyRedirects: ",
    "401": "answers with status 401: HF_TOKEN is not valid there",
    "403": "answers with status 403: set HF_TOKEN to a token that may read it",
    "404": "answers with status 404: HF_ENDPOINT names another server than a hub",
    "429": "answers with status 429: wait a while, or set HF_TOKEN",
    "500": "answers with status 500: try again later",
    "503": "answers with status 503: try again later",
}


USUAL = "silent", "cut", "a login page", "429"


@pytest.mark.parametrize(
    "kind", [kind if kind in USUAL else pytest.param(kind, marks=pytest.mark.slow) for kind in FAILURES]
)
def test_a_server_that_is_no_hub_is_one_line(cached, tmp_path, monkeypatch, capsys, kind):
    """Whatever it answers, also nothing. A model that the cache has is read from there, and a line says so."""
    monkeypatch.setattr(hub_module, "SECONDS", 1.0)
    with broken(kind) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        began = time.monotonic()
        assert main(["convert", "from-hf", "hf://local/qwen3", str(tmp_path / "out")]) == 2
        assert time.monotonic() - began < 6
    error = capsys.readouterr().err
    failed = f"hf://local/qwen3: it is not in the cache of the hub, and {endpoint} {FAILURES[kind]}"
    assert failed in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["silent", "cut", "500"])
def test_the_cache_takes_the_place_of_a_hub_that_fails(cached, hub, monkeypatch, capsys, kind):
    monkeypatch.setattr(hub_module, "SECONDS", 1.0)
    first = hub_module.snapshot("hf://local/qwen3")
    with broken(kind) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        for name in ("hf://local/qwen3", f"hf://local/qwen3@{COMMIT}"):
            capsys.readouterr()
            assert hub_module.snapshot(name).folder == first.folder
            assert f"warning: {name} is taken from the cache: {endpoint} {FAILURES[kind]}" in capsys.readouterr().err


def test_a_part_of_a_model_is_not_taken_from_the_cache(cached, hub_root, tmp_path, monkeypatch, capsys):
    """The hub lists its files, and fails at one of them; a second trial fetches it."""
    with served(hub_root, fails_at="model.safetensors") as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", RESOLVED.format(endpoint))
        assert main(["convert", "from-hf", "hf://local/qwen3", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"hf://local/qwen3 cannot be downloaded: {endpoint} answers with status 500: try again later" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spec", ["models/tokenizer.model", "models/tokenizer.json"])
def test_a_mistyped_file_is_not_asked_for(cached, monkeypatch, spec):
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    with pytest.raises((OSError, ValueError), match=spec) as error:
        load_tokenizer(spec)
    assert CLOSED not in str(error.value)


def test_a_folder_is_not_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "model").mkdir(parents=True)
    assert not on_hub("local/model") and not on_hub(tmp_path / "model") and not on_hub("model")
    assert on_hub("local/other") and on_hub("local/other@v1") and on_hub("hf://local/model")
    shutil.rmtree(tmp_path / "local")
    assert on_hub("local/model")


def flip(path):
    """Change one bit in the middle of a file, and leave its times as they are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("place", ["cache", *SNAPSHOT_AND_FOLDER])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_changed_bit_of_a_download_is_found(cached, tmp_path, capsys, place, name):
    """In the cache and in a folder of its own; without the file, the same command downloads it again."""
    folder = hub_module.snapshot("hf://local/qwen3").folder
    words = {"cache": "hf://local/qwen3", "snapshot": str(folder), "local_dir": str(tmp_path / "downloaded")}
    if place == "local_dir":
        folder = tmp_path / "downloaded"
        snapshot_download("local/qwen3", local_dir=folder)
    command = ["convert", "from-hf", words[place], str(tmp_path / "out")]
    flip(folder / name)
    stored = (folder / name).resolve()
    assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{folder / name} is not what the hub has: its hash is " in error
    assert f"delete {stored}, then" in error and not (tmp_path / "out").exists()
    stored.unlink()
    if place == "cache":
        assert main(command) == 0


def test_a_changed_bit_of_a_dataset_is_found(cached, tmp_path, capsys):
    folder = hub_module.snapshot("hf://local/test", kind="dataset").folder
    flip(folder / "train.jsonl")
    words = ["--source=hf://local/test", f"--store={tmp_path / 'store'}", "--tokenizer=bytes", "--held_out=0"]
    assert main(["data", "prepare", *words]) == 2
    assert "train.jsonl is not what the hub has" in capsys.readouterr().err


def test_an_edited_file_is_not_compared(cached, tmp_path):
    """A person may edit a config.json that `hf download --local-dir` wrote."""
    folder = tmp_path / "downloaded"
    snapshot_download("local/qwen3", local_dir=folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    os.utime(config, (time.time() + 10, time.time() + 10))
    hub_module.check_download(folder)


def test_hashes_are_those_of_git(tmp_path):
    """`printf 'hello\\n' | git hash-object --stdin`."""
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "ce013625030ba8dba906f756967f9e9ca394464a").write_bytes(b"hello\n")
    (snapshot / "NOTICE").symlink_to(blobs / "ce013625030ba8dba906f756967f9e9ca394464a")
    hub_module.check_download(snapshot)
    (blobs / "ce013625030ba8dba906f756967f9e9ca394464a").write_bytes(b"hellp\n")
    with pytest.raises(ValueError, match="its hash is "):
        hub_module.check_download(snapshot)
