"""Files in an object store: a folder, and Google Cloud Storage as an emulator on loopback speaks it."""

import pytest

from ringformer.files import bucket as object_store
from ringformer.files.bucket import ObjectStore, check_url, is_url
from tests.gcs_emulator import emulated


@pytest.fixture(params=["gs", "file"])
def url(request, tmp_path, monkeypatch):
    if request.param == "file":
        yield f"file://{tmp_path}/a #1%20b?"
        return
    with emulated() as (_, address):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        yield "gs://bucket/runs/a #1%20b?"


def test_files_are_what_was_written(url):
    """Whatever the path has in it; more than a page of a listing has; nothing of a neighbour whose name begins so."""
    store, neighbour = ObjectStore(url), ObjectStore(f"{url}2")
    neighbour.write("x", b"theirs")
    names = [f"d/{i}/x y" for i in range(120)]
    for name in names:
        store.write(name, name.encode())
    assert store.names() == sorted(names) and store.read("d/7/x y") == b"d/7/x y"
    store.write("d/7/x y", b"\x00" * 3_000_000)
    assert store.read("d/7/x y") == b"\x00" * 3_000_000
    store.delete("d/7/x y")
    store.delete("never there")
    assert len(store.names()) == 119 and ObjectStore(url + "/").names() == store.names()
    with pytest.raises(FileNotFoundError, match=r"there is no .*/d/7/x y"):
        store.read("d/7/x y")
    assert neighbour.names() == ["x"] and neighbour.read("x") == b"theirs"


@pytest.mark.parametrize("status", [403, 503])
def test_a_store_that_refuses_is_one_line(status, monkeypatch):
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    with emulated() as (emulator, address):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        store = ObjectStore("gs://bucket/x")
        emulator.refuse = lambda method, name: status
        for done, call in (
            ("written", lambda: store.write("a", b"b")),
            ("read", lambda: store.read("a")),
            ("written", store.check),
            ("deleted", lambda: store.delete("a")),
        ):
            with pytest.raises(
                OSError, match=f"^gs://bucket/x/(a|probe-of-ringformer) cannot be {done}: .*{status}.*$"
            ):
                call()


@pytest.mark.parametrize(
    ("status", "said"), [(403, "storage.objects.list"), (404, "storage.objects.list"), (503, "cannot be listed: .*503")]
)
def test_a_listing_that_is_forbidden_is_not_taken_for_an_empty_one(status, said, monkeypatch):
    """By tensorstore it is."""
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    with emulated() as (emulator, address):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        store = ObjectStore("gs://bucket/x")
        store.check()
        emulator.refuse = lambda method, name: None if name else status
        with pytest.raises(OSError, match=said):
            store.check()


def test_what_fails_once_is_asked_again(monkeypatch):
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 3, "initial_delay": "1ms", "max_delay": "1ms"})
    with emulated() as (emulator, address):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        store = ObjectStore("gs://bucket/x")
        answers = iter([503, None])
        emulator.refuse = lambda method, name: next(answers, None)
        store.write("a", b"b")
        assert emulator.objects == {"x/a": b"b"} and len(emulator.requests) == 2


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://", "file://x/y", "gs:/bucket", "http://x/y", "runs/x"])
def test_what_is_not_known_is_refused(url):
    with pytest.raises(ValueError, match="names no object store that is known: gs://BUCKET/PATH, or file:///PATH"):
        check_url(url)


def test_what_a_url_is():
    assert is_url("gs://b") and is_url("s3://b") and not is_url("runs/x") and not is_url("/a:b/c")
