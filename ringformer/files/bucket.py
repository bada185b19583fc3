"""Files in an object store, by tensorstore: gs://BUCKET/PATH of Google Cloud Storage, or file:///PATH, a folder.

Tested against an emulator on loopback; credentials are those that `gcloud auth application-default login` leaves, or
the machine's own.
"""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "16s"}
PROBE = "probe-of-ringformer"
SECONDS = 600.0
"""The longest that one file may take."""


def is_url(place: str) -> bool:
    """True if a place is named by a URL, not by a path of this machine."""
    return "://" in place


def check_url(url: str) -> None:
    """Raise ValueError for a URL that no `ObjectStore` is opened by."""
    _spec(url)


class ObjectStore:
    """The files below a URL, by their names, which have slashes as paths do.

    Every method raises OSError, with the URL and the cause, if the store does not answer, or refuses.
    """

    def __init__(self, url: str):
        import tensorstore as ts  # here: configs are checked where nothing is trained

        self.url = url.rstrip("/")
        spec, context = _spec(url), ts.Context({"gcs_request_retries": RETRIES})
        self._files = self._wait("opened", lambda: ts.KvStore.open(spec, context=context))

    def check(self) -> None:
        """Raise OSError if files cannot be written and found, which is tried: tensorstore takes a listing that is
        forbidden, or one of a bucket that does not exist, for an empty one."""
        self.write(PROBE, b"")
        listed = PROBE in self.names()
        self.delete(PROBE)
        if not listed:
            raise OSError(f"{self.url} cannot be listed: it takes the permission storage.objects.list")

    def overlaps(self, folder: Path, part: str) -> bool:
        """True if what is below the URL, its folder `part` above all, and a folder of this machine are one place, or
        one is in the other, by whatever links and mounts: a file that is new in one is looked for in the other."""
        if not folder.is_dir() or not os.access(folder, os.W_OK):  # nothing there can be lost
            return False
        name = f"{PROBE}-{uuid.uuid4().hex}"
        self.write(f"{part}/{name}", b"")
        try:
            if any(name in files for _, _, files in os.walk(folder)):
                return True
        finally:
            self.delete(f"{part}/{name}")
        (folder / name).touch()
        try:
            return any(there.endswith(name) for there in self.names())
        finally:
            (folder / name).unlink()

    def names(self) -> list[str]:
        """The names of all files, sorted; none where `check` would fail."""
        return sorted(name.decode() for name in self._wait("listed", lambda: self._files.list()))

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError if there is no such file."""
        result = self._wait("read", lambda: self._files.read(name), name)
        if result.state != "value":
            raise FileNotFoundError(f"there is no {self.url}/{name}")
        return result.value

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: it appears whole or not at all."""
        self._wait("written", lambda: self._files.write(name, content), name)

    def delete(self, name: str) -> None:
        """Delete a file; one that is not there is no error."""
        self._wait("deleted", lambda: self._files.write(name, None), name)

    def _wait(self, done: str, begin: Callable[[], Any], name: str = "") -> Any:
        place = f"{self.url}/{name}" if name else self.url
        try:
            return begin().result(timeout=SECONDS)
        except TimeoutError:
            raise OSError(f"{place} was not {done} within {SECONDS:.0f} seconds") from None
        except (ValueError, RuntimeError, OSError) as error:  # tensorstore has no type of its own
            raise OSError(f"{place} cannot be {done}: {str(error).splitlines()[0]}") from None


def _spec(url: str) -> dict[str, str]:
    """tensorstore's; a URL of its own would read %20 and # in a path otherwise than a person means them."""
    scheme, _, place = url.rstrip("/").partition("://")
    bucket, _, path = place.partition("/")
    if scheme == "gs" and bucket:
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
    if scheme == "file" and place.startswith("/"):
        return {"driver": "file", "path": f"{place}/"}
    raise ValueError(
        f"{url!r} names no object store that is known: gs://BUCKET/PATH, or file:///PATH for a folder; "
        "mount others, and name the folder"
    )
