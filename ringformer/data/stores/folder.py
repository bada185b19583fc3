"""Folder of prepared stores: it is either complete or absent, and its files are verified.

DIR/train, DIR/eval   the stores (`token_store.py`)
DIR/report.json       what was included and left out
DIR/tokenizer         a copy of the tokenizer's files, if it has any
DIR/source.json       size, time and hash of the source's files, to detect changes
DIR/manifest.json     {file: [bytes, hash]} of all files, except those that a store.json lists
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ringformer.data.stores.checked_array import REBUILD
from ringformer.data.stores.integrity import check_files, read_meta
from ringformer.data.stores.token_store import TokenStore
from ringformer.files.manifest import MANIFEST, DamagedFiles, read_manifest, write_manifest
from ringformer.files.new_folder import new_folder


@contextmanager
def new_stores(directory: Path) -> Iterator[Path]:
    """Yield a folder to build stores in, which becomes `directory` at the end of the block; as `new_folder`."""
    with new_folder(directory, "store") as building:
        yield building
        listed = []
        for path in building.glob("*/store.json"):
            for name in read_meta(path)["files"]:
                listed.append(f"{path.parent.name}/{name}")
        write_manifest(building, but=listed)


def check_folder(directory: Path) -> None:
    """Raise ValueError if a file of `directory` is missing or has changed; of each store, only store.json is
    checked."""
    try:
        manifest = read_manifest(directory)
    except DamagedFiles as error:
        raise ValueError(f"{error}: {REBUILD}") from None
    if manifest is None:
        raise ValueError(f"{directory / MANIFEST} is missing: {REBUILD}")
    check_files(directory, manifest)


def open_one(path: str | Path, names: Sequence[str]) -> TokenStore:
    """Open the store at `path` or, if `path` is a folder of stores, the first store of `names` that it has."""
    path = Path(path)
    for name in names:
        if (path / name).is_dir():
            check_folder(path)
            return TokenStore(path / name)
    if (path.parent / MANIFEST).is_file():
        check_folder(path.parent)
    return TokenStore(path)


def check_all(path: Path, say: Callable[[str], None]) -> None:
    """Compare every file of the store at `path`, or of all stores in that folder, with its hash, and wait until this is
    done. `say` is told of waits. Raises ValueError for a file that has changed."""
    stores = [described.parent for described in sorted(path.glob("*/store.json"))]
    for place in stores or [path]:
        open_one(place, ()).check.wait(say)
