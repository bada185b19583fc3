"""Files in an object store, through tensorstore: gs://BUCKET/PATH in Google Cloud Storage, or the folder file:///PATH.

The credentials are those of `gcloud auth application-default login`, or the machine's own. Tests use an emulator on
loopback.
"""

import os
import uuid
from pathlib import Path
from typing import Any

RETRIES: dict[str, Any] = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "16s"}
PROBE = "probe-of-ringformer"
SECONDS = 600.0
"""Time limit for the transfer of one file."""


def is_url(place: str) -> bool:
    """Return True if a place is a URL, not a path on this machine."""
    return "://" in place


def check_url(url: str) -> None:
    """Raise ValueError if `ObjectStore` cannot open a URL of this kind."""
    _spec(url)


class ObjectStore:
    """Files below a URL, by name; names contain slashes, like paths.

    Every method raises OSError, with the URL and the cause, if the store refuses or does not answer.
    """

    def __init__(self, url: str):
        import tensorstore as ts  # imported here, because checking a config needs no store

        self.url: str = url.rstrip("/")
        context = ts.Context({"gcs_request_retries": RETRIES})
        self._files = self._wait("opened", ts.KvStore.open(_spec(url), context=context))

    def check(self) -> None:
        """Write, list and delete a file; raise OSError if that fails. tensorstore returns an empty list if listing is
        forbidden, or if the bucket does not exist."""
        self.write(PROBE, b"")
        listed = PROBE in self.names()
        self.delete(PROBE)
        if not listed:
            raise OSError(f"{self.url} cannot be listed: it takes the permission storage.objects.list")

    def overlaps(self, folder: Path, part: str) -> bool:
        """Return True if the URL, or `part` below it, and a folder of this machine are the same place, or if one
        contains the other, through any links and mounts. To test this, a file is created in one and looked for in the
        other."""
        if not folder.is_dir() or not os.access(folder, os.W_OK):  # nothing in the folder can be lost
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
            return any(other.endswith(name) for other in self.names())
        finally:
            (folder / name).unlink()

    def names(self) -> list[str]:
        """Return the sorted names of all files; an empty list if `check` would fail."""
        return sorted(name.decode() for name in self._wait("listed", self._files.list()))

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if it does not exist."""
        result = self._wait("read", self._files.read(name), name)
        if result.state != "value":
            raise FileNotFoundError(f"there is no {self.url}/{name}")
        return result.value

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: it appears whole or not at all."""
        self._wait("written", self._files.write(name, content), name)

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        self._wait("deleted", self._files.write(name, None), name)

    def _wait(self, done: str, result: Any, name: str = "") -> Any:
        """Return the value of tensorstore's future `result`. An error says that the file could not be `done` (e.g.
        "read")."""
        place = f"{self.url}/{name}" if name else self.url
        try:
            return result.result(timeout=SECONDS)
        except TimeoutError:
            raise OSError(f"{place} was not {done} within {SECONDS:.0f} seconds") from None
        except (ValueError, RuntimeError, OSError) as error:  # tensorstore has no error type of its own
            raise OSError(f"{place} cannot be {done}: {str(error).splitlines()[0]}") from None


def _spec(url: str) -> dict[str, str]:
    """Return tensorstore's spec of a URL. (tensorstore's own URLs decode %20 and #, which here belong to the path.)"""
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
