"""Repositories of the Hugging Face hub: a snapshot is downloaded first, and everything is then read from its folder.

`HF_TOKEN` opens private and gated repositories, `HF_HUB_OFFLINE=1` reads the cache alone, `HF_ENDPOINT` names a mirror,
`HF_HOME` the cache.
"""

import hashlib
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

PREFIX = "hf://"
MODEL_FILES = "*.json", "*.safetensors", "tokenizer*", "*.jinja", "README.md", "LICENSE*", "NOTICE", "USE_POLICY.md"
TOKENIZER_FILES = "tokenizer*", "special_tokens_map.json", "config.json", "*.jinja"
SECONDS = 30.0
"""Longest silence of a server."""
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_RECORD = re.compile(r"[0-9a-f]+\n(?P<hash>[0-9a-f]+)\n(?P<downloaded>\d+(\.\d*)?)\n")
_SHA256_DIGITS = 64
_GIT_DIGITS = 40


class Snapshot(NamedTuple):
    """A revision of a repository, on disk."""

    folder: Path
    name: str
    """hf://ORGANISATION/NAME@COMMIT."""


def on_hub(path: str | Path) -> bool:
    """Return True for hf://ORGANISATION/NAME, and for ORGANISATION/NAME if there is no such file or folder."""
    text = str(path)
    return text.startswith(PREFIX) or (_ID.fullmatch(text.partition("@")[0]) is not None and not Path(text).exists())


def repository_of(origin: str) -> tuple[str, str | None]:
    """Return the repository and the commit in a snapshot's name; of anything else, such as a folder, only the name."""
    repo, _, commit = origin.removeprefix(PREFIX).partition("@")
    if origin.startswith(PREFIX) and commit and _ID.fullmatch(repo):
        return repo, commit
    return origin, None


def local(path: str | Path, files: Sequence[str] | None = None, kind: Literal["model", "dataset"] = "model") -> Path:
    """Return `path`, or the folder of a snapshot if it is on the hub; arguments and errors of `snapshot`."""
    if not on_hub(path):
        return Path(path)
    return snapshot(str(path), files, kind).folder


def snapshot(name: str, files: Sequence[str] | None = None, kind: Literal["model", "dataset"] = "model") -> Snapshot:
    """Download a repository, hf://ORGANISATION/NAME or ORGANISATION/NAME, either with @REVISION, unless the cache has
    it.

    Args:
      files: patterns of the files to download; None: all.

    Raises ValueError, in one line that says what to do, if the hub has no such repository or revision, a token is
    missing, a file in the cache is not what the hub has, or the hub does not answer as it should: if it lists no files,
    the cache is used where it has the revision, and a line on stderr says so.
    """
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    if not _ID.fullmatch(repo):
        raise ValueError(
            f"{name} names no repository of the hub: write {PREFIX}ORGANISATION/NAME, with @REVISION or not"
        )
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise ValueError(f"{name} is read by huggingface_hub: pip install huggingface_hub") from None
    absent = "" if name.startswith(PREFIX) else "there is no such folder, and "
    _limit_waiting(huggingface_hub.get_session())
    download = partial(
        huggingface_hub.snapshot_download,
        repo,
        revision=revision or None,
        repo_type=kind,
        allow_patterns=None if files is None else list(files),
    )
    is_listed = False
    try:
        huggingface_hub.HfApi(endpoint=constants.ENDPOINT).repo_info(repo, revision=revision or None, repo_type=kind)
        is_listed = True
        folder = download()
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{repo}"
        raise ValueError(f"{name} is gated: accept its terms at {page}, and set HF_TOKEN to a token of yours") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{name}: the hub's {repo} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{name}: {absent}the hub has no such {kind}; for a private one, set HF_TOKEN to a token of yours"
        ) from None
    except Exception as error:  # whatever a server may answer
        why = "HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            why = f"{constants.ENDPOINT} {_failure(error)}"
        if is_listed:  # the cache has some of its files, perhaps not all
            raise ValueError(f"{name} cannot be downloaded: {why}") from None
        try:
            folder = download(local_files_only=True)
        except Exception:
            raise ValueError(f"{name}: {absent}it is not in the cache of the hub, and {why}") from None
        if not constants.HF_HUB_OFFLINE:
            print(f"warning: {name} is taken from the cache: {why}", file=sys.stderr)
    check_download(Path(folder), files)
    return Snapshot(Path(folder), f"{PREFIX}{repo}@{Path(folder).name}")


def check_download(folder: Path, files: Sequence[str] | None = None) -> None:
    """Compare the files of a snapshot in the hub's cache, and of a folder that `hf download --local-dir` wrote, with
    the hashes that the hub has of them: SHA-256 of large files, git's hash of small ones. Other files have none.

    Args:
      files: patterns of the names of the files to compare; None: all.

    Raises ValueError for a file that differs.
    """
    for name, expected in _hashes_on_hub(folder).items():
        is_asked = files is None or any(fnmatch(name, pattern) for pattern in files)
        if is_asked:
            _check_file(folder / name, expected)


def _hashes_on_hub(folder: Path) -> dict[str, str]:
    """Return the hashes that the hub has of the files of a folder, by name.

    In the cache, a file is a link to a blob that its hash names. In a folder of its own it has a record of three lines,
    the second of which is its hash; the third is the time of the download, so a file that was edited since has none.
    """
    hashes = {}
    if folder.parent.name == "snapshots":
        for path in sorted(folder.rglob("*")):
            blob = path.resolve()
            if path.is_symlink() and blob.is_file() and blob.parent.name == "blobs":
                hashes[path.relative_to(folder).as_posix()] = blob.name
    records = folder / ".cache" / "huggingface" / "download"
    for record in sorted(records.rglob("*.metadata")):
        name = record.relative_to(records).as_posix().removesuffix(".metadata")
        described = _RECORD.fullmatch(record.read_text(errors="replace"))
        path = folder / name
        if described and path.is_file() and path.stat().st_mtime <= float(described["downloaded"]) + 1:
            hashes[name] = described["hash"]
    return hashes


def _check_file(path: Path, expected: str) -> None:
    """Raise ValueError if a file has another hash than the hub's. Hashes of other lengths are not of the content."""
    with path.open("rb") as file:
        if len(expected) == _SHA256_DIGITS:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        elif len(expected) == _GIT_DIGITS:
            content = file.read()
            actual = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        else:
            return
    if actual != expected:
        stored = path.resolve()
        raise ValueError(
            f"{path} is not what the hub has: its hash is {actual}, must be {expected}. A disk or a cache changed it: "
            f"delete {stored}, then the same command downloads it again"
        )


def _limit_waiting(session: Any) -> None:
    """Have requests of the hub's client that would wait for ever fail after `SECONDS` of silence."""
    hooks = session.event_hooks
    if _with_limit not in hooks["request"]:
        session.event_hooks = hooks | {"request": [*hooks["request"], _with_limit]}


def _with_limit(request: Any) -> None:
    limits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {name: seconds or SECONDS for name, seconds in limits.items()}


ADVICE = {
    401: ": HF_TOKEN is not valid there",
    403: ": set HF_TOKEN to a token that may read it",
    404: ": HF_ENDPOINT names another server than a hub",
    429: ": wait a while, or set HF_TOKEN",
}
"""Advice for a status."""


def _failure(error: Exception) -> str:
    """Say what a server did instead of answering."""
    cause = error.__cause__ if type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ else error
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status is not None:
        return f"answers with status {status}{ADVICE.get(status, ': try again later')}"
    if "ConnectError" in kinds:
        return "cannot be reached"
    if "TimeoutException" in kinds:
        return f"does not answer within {SECONDS:.0f} seconds"
    first_line = (str(cause).splitlines() or [""])[0]
    return f"does not answer as a hub does ({type(cause).__name__}: {first_line[:100]})"
