"""Copies of a run's checkpoints in an object store, in case the folder of the run is lost.

    URL/config.json, identity.json, metrics.jsonl, ...    the files of RUN_DIR itself
    URL/checkpoints/STEP/...                              a checkpoint, complete once it has its manifest, the last file
    URL/checkpoints/STEP.2/...                            a second copy, which replaces the first once it is complete

A run sends what it saves (`Copies`), and `ringformer checkpoint copy` brings the copies back. Files are compared with
the manifest of hashes before they are sent, and again after they are brought back.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.verify import checkpoint_faults, saved_steps, summary, tree_folder
from ringformer.files.atomic import sync, write_whole
from ringformer.files.bucket import ObjectStore
from ringformer.files.json_text import parse_json
from ringformer.files.manifest import MANIFEST, DamagedFiles, read_manifest, read_verified
from ringformer.files.run_layout import CHECKPOINTS, IDENTITY
from ringformer.processes.run_lock import RunLock

TREE = "default"
LAST = f"{TREE}/{MANIFEST}"
AT_ONCE = 8
"""Files that are copied at once, each in host memory."""


def copied_steps(store: ObjectStore) -> list[int]:
    """Return the steps whose checkpoint is complete in a store, in order."""
    return sorted(step for step, places in _places(store).items() if any(places.values()))


def settled_steps(store: ObjectStore) -> set[int]:
    """Return the steps whose checkpoint is complete in a store and was not being replaced when copying stopped."""
    return {step for step, places in _places(store).items() if list(places.values()) == [True]}


def _places(store: ObjectStore) -> dict[int, dict[str, bool]]:
    """Return, for each step in a store, the prefixes of its copies, each with True if that copy is complete. There are
    two copies while a step is being replaced."""
    steps: dict[int, dict[str, bool]] = {}
    for name in store.names():
        if match := re.match(r"checkpoints/(\d+)(?:\.2)?/", name):
            places = steps.setdefault(int(match[1]), {})
            places[match[0]] = name == match[0] + LAST or places.get(match[0], False)
    return steps


def _complete(places: dict[str, bool]) -> list[str]:
    """Return the prefixes of the complete copies of a step."""
    return [place for place, complete in places.items() if complete]


def send_step(run_dir: Path, step: int, store: ObjectStore) -> None:
    """Copy a checkpoint to a store. An earlier copy of this step is removed once the new copy is complete.

    Raises DamagedFiles, before the copy counts as complete, if a file differs from the manifest, and OSError if the
    store fails.
    """
    folder = tree_folder(run_dir, step).parent
    manifest = read_manifest(folder / TREE)
    if manifest is None:
        raise DamagedFiles(f"{folder} has no manifest: it was saved before there were hashes, and is not copied")
    hashes = {f"{TREE}/{name}": entry for name, entry in manifest.items()}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = files | hashes.keys()
    old = set(_complete(_places(store).get(step, {})))
    first = f"checkpoints/{step}/"
    second = f"checkpoints/{step}.2/"
    prefix = second if first in old else first
    _delete(prefix, store)

    def send(name: str) -> None:
        content = read_verified(folder, name, hashes) if name in hashes else (folder / name).read_bytes()
        store.write(prefix + name, content)

    _all(send, names - {LAST})
    send(LAST)
    for place in old - {prefix}:
        _delete(place, store)


def send_files(run_dir: Path, store: ObjectStore) -> None:
    """Copy the files of the run's folder itself, which describe the run and contain its metrics."""
    for path in sorted(run_dir.iterdir()):
        if path.is_file() and path.suffix != ".part":
            store.write(path.name, path.read_bytes())


def fetch_step(store: ObjectStore, step: int, run_dir: Path) -> None:
    """Bring a checkpoint back; it gets its name once it is complete. Raises DamagedFiles if it is not whole."""
    part = run_dir / "copied.part"
    folder = tree_folder(part, step).parent
    prefix = _complete(_places(store)[step])[0]
    shutil.rmtree(part, ignore_errors=True)

    def fetch(name: str) -> None:
        path = folder / name.removeprefix(prefix)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DamagedFiles(f"{store.url}/{name} is no file of a checkpoint")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(name))
        sync(path)

    try:
        _all(fetch, _below(prefix, store))
        faults = checkpoint_faults(part, step)
        if faults != []:
            fault = summary(faults or ["it has no manifest"]).replace(str(folder), "")
            raise DamagedFiles(f"the copy of step {step} in {store.url} is damaged ({fault})")
        place = tree_folder(run_dir, step).parent
        place.parent.mkdir(exist_ok=True)
        folder.rename(place)
        sync(place.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fetch_files(store: ObjectStore, run_dir: Path, *, replace: bool) -> None:
    """Bring back the files of the run's folder itself: the missing files or, with `replace`, all of them."""
    for name in store.names():
        if "/" not in name and (replace or not (run_dir / name).exists()):
            write_whole(run_dir / name, store.read(name))


def _delete(prefix: str, store: ObjectStore) -> None:
    """Delete a copy, beginning with the manifest that marks it as complete."""
    for name in sorted(_below(prefix, store), key=lambda name: name != prefix + LAST):
        store.delete(name)


def _below(prefix: str, store: ObjectStore) -> list[str]:
    return [name for name in store.names() if name.startswith(prefix)]


def parts_of(place: ObjectStore | Path) -> list[str]:
    """Return the parts of a place that have checkpoints: "" for a run without stages, else the names of stages."""
    if isinstance(place, Path):
        names = [f"{path.relative_to(place)}" for path in place.glob("**/" + LAST)]
    else:
        names = place.names()
    pattern = rf"(?:(stage-\d+-\d+)/)?checkpoints/\d+(?:\.2)?/{LAST}"
    parts = set()
    for name in names:
        if match := re.fullmatch(pattern, name):
            parts.add(match[1] or "")
    return sorted(parts, key=_stage_number)


def _stage_number(part: str) -> int:
    """Return the number in the name of a stage; 0 for a run without stages."""
    return int(part.split("-")[1]) if part else 0


def send(run_dir: Path, store: ObjectStore) -> Iterator[tuple[str, bool]]:
    """Copy to a store all parts of a run that the store lacks. Yield a line for each checkpoint, and True if it is
    damaged. Raises ValueError if the store has checkpoints that the run lacks, or if the store and the run's folder
    overlap."""
    if refused := refusal(run_dir, store):
        raise ValueError(refused)
    send_files(run_dir, store)
    yield from _copy_missing(
        saved_steps(run_dir), settled_steps(store), store.url, lambda step: send_step(run_dir, step, store)
    )


def receive(store: ObjectStore, run_dir: Path) -> Iterator[tuple[str, bool]]:
    """Copy to a folder all parts of a run that the folder lacks, and yield lines as `send` does. Raises ValueError if
    the folder has later checkpoints, holds another run, or overlaps the store."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with RunLock(run_dir):
        if refused := not_apart(run_dir, store):
            raise ValueError(refused)
        copied = copied_steps(store)
        own = saved_steps(run_dir)
        if own and own[-1] > copied[-1]:
            both = f"{run_dir} has checkpoints up to step {own[-1]}, {store.url} up to step {copied[-1]}"
            raise ValueError(f"{both}: nothing is brought back over later ones")
        if own and not _same_run(run_dir, store, set(copied) & set(own)):
            raise ValueError(f"{run_dir} is another run than {store.url} has checkpoints of: name another folder")
        yield from _copy_missing(copied, own, run_dir, lambda step: fetch_step(store, step, run_dir))
        fetch_files(store, run_dir, replace=not own or copied[-1] > own[-1])


def _copy_missing(
    steps: Iterable[int], present: Collection[int], place: object, copy: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    """Call `copy` for the steps that are not present, and yield lines as `send` does."""
    for step in steps:
        if step in present:
            yield f"step {step} is in {place}", False
            continue
        try:
            copy(step)
            yield f"step {step} was copied to {place}", False
        except DamagedFiles as error:
            yield f"step {step} is damaged, and not copied: {error}", True


def refusal(run_dir: Path, store: ObjectStore) -> str:
    """Return the reason why a run that sends its copies to this store may not start; "" if it may. Raises OSError if
    the store fails."""
    store.check()
    if refused := not_apart(run_dir, store):
        return refused
    copied = copied_steps(store)
    own = saved_steps(run_dir)
    if copied and copied[-1] > max(own, default=-1):
        here = f"up to step {own[-1]}" if own else "none"
        return (
            f"{store.url} has checkpoints up to step {copied[-1]}, {run_dir} has {here}: bring them back by "
            f"`ringformer checkpoint copy {store.url} {run_dir}`, or choose another copy_to"
        )
    if copied and not _same_run(run_dir, store, set(copied) & set(own)):
        return f"{store.url} has the checkpoints of another run than {run_dir}: choose another copy_to"
    return ""


def not_apart(run_dir: Path, store: ObjectStore) -> str:
    """Return the reason to copy nothing between a folder and a store that overlap (losing one would mean losing the
    other); "" if they do not overlap."""
    if any(store.overlaps(folder, CHECKPOINTS) for folder in (run_dir, run_dir / CHECKPOINTS)):
        return f"{store.url} and {run_dir} are one place, or one is in the other: name another place for the copies"
    return ""


def _same_run(run_dir: Path, store: ObjectStore, common: set[int]) -> bool:
    """Return True if folder and store hold the same run: compare the newest of the `common` checkpoints or, if there
    are none, the hashes in the runs' records."""
    if common := common & settled_steps(store):
        manifest = tree_folder(run_dir, max(common)) / MANIFEST
        (place,) = _places(store)[max(common)]
        return store.read(place + LAST) == manifest.read_bytes()
    return _run_hash(store.read(IDENTITY)) == _run_hash((run_dir / IDENTITY).read_bytes())


def _run_hash(record: bytes) -> str:
    """Return the run's hash from the content of an identity.json; "" if it has none."""
    with suppress(ValueError, TypeError, KeyError):
        return str(parse_json(record)["hash"])
    return ""


class Copies:
    """Copies of a run's checkpoints, sent to the store at `url` by a thread of process 0 while the run trains."""

    def __init__(self, run_dir: Path, url: str):
        self._run_dir = run_dir
        self._store = ObjectStore(url)
        self._threads = ThreadPoolExecutor(1, "copies of checkpoints")
        self._sending: Future[Any] | None = None
        self._sent = settled_steps(self._store)

    def refusal(self) -> str:
        """Return the reason why the run may not start; "" if it may. Raises OSError if the store fails."""
        return refusal(self._run_dir, self._store)

    def begin(self, step: int, keep: Keep) -> None:
        """Send the checkpoint that the run continues from, unless the store has it."""
        if step not in self._sent:
            self.start(step, keep)

    def start(self, step: int, keep: Keep) -> None:
        """Wait until the previous checkpoint is sent, then start sending this one. Raises OSError if the previous one
        failed. The copy of the newest proven checkpoint stays in the store, even if the run's folder no longer has that
        checkpoint."""
        self.wait()
        self._sending = self._threads.submit(self._send, step, keep.proven(self._sent))

    def check(self) -> None:
        """Raise OSError if sending has failed, without waiting."""
        if self._sending is not None and self._sending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is sent. Raises OSError if sending failed."""
        if self._sending is not None:
            self._sending.result()
            self._sending = None

    def close(self) -> None:
        """Wait until the checkpoint is sent, and send the run's files once more. Raises OSError if sending failed."""
        try:
            self.wait()
            if self._sent:
                send_files(self._run_dir, self._store)
        finally:
            self._threads.shutdown()

    def _send(self, step: int, proven: int | None) -> None:
        try:
            send_files(self._run_dir, self._store)
            send_step(self._run_dir, step, self._store)
            self._sent.add(step)
            for old in self._sent - {*saved_steps(self._run_dir), proven}:
                if old < step:  # the policy removed it here; a later one was damaged here, and its copy is whole
                    for place in _places(self._store).get(old, ()):
                        _delete(place, self._store)
                    self._sent.discard(old)
        except OSError as error:
            raise OSError(
                f"the checkpoint of step {step} is saved in {self._run_dir}, but not copied ({error}); "
                f"`ringformer checkpoint copy {self._run_dir} {self._store.url}` copies it"
            ) from None


def _all(copy: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `copy` for all files; raise its first error."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(copy, names))
