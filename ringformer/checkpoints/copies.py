"""Copies of a run's checkpoints in an object store, for the day when the folder of the run is gone.

    URL/config.json, identity.json, metrics.jsonl, ...    the files of RUN_DIR itself
    URL/checkpoints/STEP/...                              a checkpoint, whole if its manifest is there, which comes last
    URL/checkpoints/STEP.2/...                            a second copy of a step, which replaces the first when whole

A run sends what it saves (`Copies`), and `ringformer checkpoint copy` brings the copies back. Files are compared with
the manifest of hashes before they are sent, and again after they are brought back.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ringformer.checkpoints.array_folder import tree_faults
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.verify import misnamed, saved_steps, summary, tree_folder
from ringformer.files.atomic import sync, write_whole
from ringformer.files.bucket import ObjectStore
from ringformer.files.manifest import MANIFEST, DamagedFiles, read_manifest, verify_content
from ringformer.files.run_layout import CHECKPOINTS, IDENTITY
from ringformer.processes.run_lock import RunLock

TREE = "default"
LAST = f"{TREE}/{MANIFEST}"
AT_ONCE = 8
"""Files under way, each in host memory."""


def copied_steps(store: ObjectStore) -> list[int]:
    """Return the steps of which a store has a whole checkpoint, in order."""
    return sorted(step for step, places in _places(store).items() if any(places.values()))


def _places(store: ObjectStore) -> dict[int, dict[str, bool]]:
    """The copies in a store, by step: their prefixes, and whether each is whole; two while a step is replaced."""
    steps: dict[int, dict[str, bool]] = {}
    for name in store.names():
        if match := re.match(r"checkpoints/(\d+)(?:\.2)?/", name):
            places = steps.setdefault(int(match[1]), {})
            places[match[0]] = name == match[0] + LAST or places.get(match[0], False)
    return steps


def settled_steps(store: ObjectStore) -> set[int]:
    """The steps in a store whose copies are whole and were not being replaced when a copy was interrupted."""
    return {step for step, places in _places(store).items() if list(places.values()) == [True]}


def send_step(run_dir: Path, step: int, store: ObjectStore) -> None:
    """Copy a checkpoint to a store; an earlier copy of this step stays until the new copy is whole, then it is removed.

    Raises DamagedFiles, before the checkpoint counts as copied, if a file differs from the manifest, and OSError if the
    store fails.
    """
    folder = tree_folder(run_dir, step).parent
    hashes = read_manifest(folder / TREE)
    if hashes is None:
        raise DamagedFiles(f"{folder} has no manifest: it was saved before there were hashes, and is not copied")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if missing := hashes.keys() - {name.removeprefix(f"{TREE}/") for name in names}:
        raise DamagedFiles(f"{folder / TREE / min(missing)} is missing")
    old = [place for place, whole in _places(store).get(step, {}).items() if whole]
    prefix = f"checkpoints/{step}.2/" if f"checkpoints/{step}/" in old else f"checkpoints/{step}/"
    _delete(prefix, store)

    def send(name: str) -> None:
        content = (folder / name).read_bytes()
        entry = hashes.get(name.removeprefix(f"{TREE}/"))
        if entry is not None and name.startswith(TREE):
            verify_content(folder / name, content, entry)
        store.write(prefix + name, content)

    _all(send, [name for name in names if name != LAST])
    send(LAST)
    for place in set(old) - {prefix}:
        _delete(place, store)


def send_files(run_dir: Path, store: ObjectStore) -> None:
    """Copy the files of the run's folder itself: those that describe the run, and its reports."""
    for path in sorted(run_dir.iterdir()):
        if path.is_file() and path.suffix != ".part":
            store.write(path.name, path.read_bytes())


def fetch_step(store: ObjectStore, step: int, run_dir: Path) -> None:
    """Bring a checkpoint back; it gets its name once it is whole. Raises DamagedFiles if it is not whole."""
    part = run_dir / "copied.part" / str(step)
    prefix = next(place for place, whole in _places(store)[step].items() if whole)
    shutil.rmtree(part.parent, ignore_errors=True)
    names = [name.removeprefix(prefix) for name in store.names() if name.startswith(prefix)]

    def fetch(name: str) -> None:
        path = part / name
        if not path.resolve().is_relative_to(part.resolve()):
            raise DamagedFiles(f"{store.url}/{prefix}{name} is no file of a checkpoint")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(prefix + name))
        sync(path)

    try:
        _all(fetch, names)
        faults = tree_faults(part / TREE)
        faults = misnamed(part / TREE, step) if faults == [] else faults
        if faults or faults is None:
            fault = summary(faults) if faults else "it has no manifest"
            raise DamagedFiles(f"the copy of step {step} in {store.url} is damaged ({fault.replace(str(part), '')})")
        place = run_dir / CHECKPOINTS / str(step)
        place.parent.mkdir(exist_ok=True)
        part.rename(place)
        sync(place.parent)
    finally:
        shutil.rmtree(part.parent, ignore_errors=True)


def fetch_files(store: ObjectStore, run_dir: Path, *, anew: bool) -> None:
    """Bring back the files of the run's folder itself: the missing files or, with `anew`, all of them."""
    for name in store.names():
        if "/" not in name and (anew or not (run_dir / name).exists()):
            write_whole(run_dir / name, store.read(name))


def _delete(prefix: str, store: ObjectStore) -> None:
    """Remove a copy, beginning with the manifest that marks it as whole."""
    names = [name for name in store.names() if name.startswith(prefix)]
    for name in sorted(names, key=lambda name: name != prefix + LAST):
        store.delete(name)


def parts_of(place: ObjectStore | Path) -> list[str]:
    """The parts of a place that have checkpoints: "" for a run itself, and the names of stages."""
    if isinstance(place, Path):
        names = [f"{path.relative_to(place)}" for path in place.glob("**/" + LAST)]
    else:
        names = place.names()
    pattern = rf"(?:(stage-\d+-\d+)/)?checkpoints/\d+(?:\.2)?/{LAST}"
    parts = {match[1] or "" for match in (re.fullmatch(pattern, name) for name in names) if match}
    return sorted(parts, key=lambda part: int(part.split("-")[1]) if part else 0)


def send(run_dir: Path, store: ObjectStore) -> Iterator[tuple[str, bool]]:
    """Copy to a store whatever of the run it lacks. Yield lines on what was done, each with whether it is a fault.
    Raises ValueError if the store has checkpoints that the run lacks, or if the two places are not apart."""
    if refused := Copies(run_dir, store.url).refusal():
        raise ValueError(refused)
    send_files(run_dir, store)
    yield from _missing(
        saved_steps(run_dir), settled_steps(store), store.url, lambda step: send_step(run_dir, step, store)
    )


def receive(store: ObjectStore, run_dir: Path) -> Iterator[tuple[str, bool]]:
    """Copy to a folder whatever of the run it lacks, and yield lines as `send` does. Raises ValueError if the folder
    has later checkpoints, holds another run, or is not apart from the store."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with RunLock(run_dir):
        if refused := not_apart(run_dir, store):
            raise ValueError(refused)
        there, own = copied_steps(store), saved_steps(run_dir)
        if own and own[-1] > there[-1]:
            both = f"{run_dir} has checkpoints up to step {own[-1]}, {store.url} up to step {there[-1]}"
            raise ValueError(f"{both}: nothing is brought back over later ones")
        if own and not Copies(run_dir, store.url).same_run(set(there) & set(own)):
            raise ValueError(f"{run_dir} is another run than {store.url} has checkpoints of: name another folder")
        yield from _missing(there, own, run_dir, lambda step: fetch_step(store, step, run_dir))
        fetch_files(store, run_dir, anew=not own or there[-1] > own[-1])


def _missing(
    steps: Iterable[int], there: Collection[int], place: object, copy: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    """Copy those of `steps` that are not there; lines and faults as `send` has them."""
    for step in steps:
        if step in there:
            yield f"step {step} is in {place}", False
            continue
        try:
            copy(step)
            yield f"step {step} was copied to {place}", False
        except DamagedFiles as error:
            yield f"step {step} is damaged, and not copied: {error}", True


class Copies:
    """Copies of what a run saves, sent to a store by a thread while the training goes on; process 0 sends them.

    Args:
      run_dir: the folder of the run.
      url: where to, as `ObjectStore` has it.
    """

    def __init__(self, run_dir: Path, url: str):
        self._run_dir, self._store = run_dir, ObjectStore(url)
        self._threads = ThreadPoolExecutor(1, "copies of checkpoints")
        self._under_way: Future | None = None
        self._sent: set[int] = set()
        self._failed = False

    def refusal(self) -> str:
        """The reason why the run may not begin with its folder as it is; "" if it may. Raises OSError of the store."""
        self._store.check()
        if refused := not_apart(self._run_dir, self._store):
            return refused
        copied, own, url = copied_steps(self._store), saved_steps(self._run_dir), self._store.url
        if not copied:
            return ""
        if not own or copied[-1] > own[-1]:
            here = f"up to step {own[-1]}" if own else "none"
            return (
                f"{url} has checkpoints up to step {copied[-1]}, {self._run_dir} has {here}: bring them back by "
                f"`ringformer checkpoint copy {url} {self._run_dir}`, or choose another copy_to"
            )
        if not self.same_run(set(copied) & set(own)):
            return f"{url} has the checkpoints of another run than {self._run_dir}: choose another copy_to"
        self._sent = settled_steps(self._store)
        return ""

    def same_run(self, common: set[int]) -> bool:
        """Compare the newest checkpoint that both places have; if they share none, compare the runs' records."""
        if common := common & settled_steps(self._store):
            mine = (tree_folder(self._run_dir, max(common)) / MANIFEST).read_bytes()
            (place,) = _places(self._store)[max(common)]
            return self._store.read(place + LAST) == mine
        mine = (self._run_dir / IDENTITY).read_bytes()
        return _hash(self._store.read(IDENTITY)) == _hash(mine)

    def begin(self, step: int, keep: Keep) -> None:
        """Send the checkpoint that the run goes on from, if it is not there."""
        if step not in self._sent:
            self.start(step, keep)

    def start(self, step: int, keep: Keep) -> None:
        """Wait until the previous checkpoint is sent, then begin to send this one. Raises OSError if sending the
        previous one failed. The newest proven copy stays, whatever is in the run's folder."""
        self.wait()
        self._under_way = self._threads.submit(self._send, step, keep.proven(self._sent))

    def check(self) -> None:
        """Raise OSError if what was being sent has failed; does not wait."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait for what is being sent. Raises OSError if it failed."""
        sending, self._under_way = self._under_way, None
        if sending is not None:
            self._failed = sending.exception() is not None
            sending.result()

    def close(self) -> None:
        """Wait for what is being sent, and send the run's reports once more. Raises OSError if sending failed."""
        try:
            self.wait()
            if self._sent and not self._failed:
                send_files(self._run_dir, self._store)
        finally:
            self._threads.shutdown()

    def _send(self, step: int, proven: int | None) -> None:
        try:
            send_files(self._run_dir, self._store)
            send_step(self._run_dir, step, self._store)
            self._sent.add(step)
            for old in self._sent - {*saved_steps(self._run_dir), proven}:
                if old < step:  # which the policy has removed here; a later one was damaged here, and is whole there
                    for place in _places(self._store).get(old, ()):
                        _delete(place, self._store)
                    self._sent.discard(old)
        except OSError as error:
            raise OSError(
                f"the checkpoint of step {step} is saved in {self._run_dir}, but not copied ({error}); "
                f"`ringformer checkpoint copy {self._run_dir} {self._store.url}` copies it"
            ) from None


def not_apart(run_dir: Path, store: ObjectStore) -> str:
    """Return the reason to copy nothing between a folder and a store: they are not apart, so losing one means losing
    the other; "" if they are apart."""
    if any(store.overlaps(folder, CHECKPOINTS) for folder in (run_dir, run_dir / CHECKPOINTS)):
        return f"{store.url} and {run_dir} are one place, or one is in the other: name another place for the copies"
    return ""


def _hash(record: bytes) -> str:
    """The hash of the run that an identity.json tells of."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(record)["hash"])
    return ""


def _all(do, names: Iterable[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in threads.map(do, names):
            pass
