"""Compiled programs, kept on disk by JAX's compilation cache: the second start of a command compiles nothing.

`train`, `generate` and `eval` keep them, as a single process, for the devices that it runs on. Programs for absent
devices cannot be read back (`estimate/workloads/targets.py`); those of simulated devices are read back wrongly before
JAX 0.12 (`simulate_cpu_devices`). Only the first of several processes would write, so at the next start the others
would compile without it, and compilers that tune together would wait for it (openxla/xla#28959).
"""

import atexit
import os
import sys
from collections import Counter
from pathlib import Path

import jax

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""JAX's variable for the folder. If it is set, all of JAX's own settings hold; empty: no program is kept."""
MOST_BYTES = 4 * 2**30
"""Size of the folder at a start, above which the oldest programs are deleted. JAX's own limit is not used: after a
process was killed while it wrote, no later one could write."""
HIT = "/jax/compilation_cache/cache_hits"
MISS = "/jax/compilation_cache/cache_misses"
"""JAX's events: a program was read from the cache, or was compiled and put there."""


def keep_programs() -> None:
    """Keep compiled programs in the user's cache, and say at the end of this process how many were read from it.

    The folder is $XDG_CACHE_HOME/ringformer/programs, or in ~/.cache. Only its owner may enter it, because its programs
    are executed. Call it after `simulate_cpu_devices`, in a command of one process.
    """
    if VARIABLE in os.environ or not _may_keep():
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringformer" / "programs"
        _make_private(folder)
        _delete_oldest(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(f"compiled programs are not kept: {error}; {VARIABLE} names another folder", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    _count_programs(folder)


def _may_keep() -> bool:
    """Return False if JAX's cache is off, or if CPU devices are simulated for a JAX that reads their programs
    back wrongly."""
    if not jax.config.values["jax_enable_compilation_cache"]:
        return False
    by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    are_simulated = by_flag or jax.config.values["jax_num_cpu_devices"] > 1
    return not are_simulated or jax.__version_info__ >= (0, 12)


def _make_private(folder: Path) -> None:
    """Make a folder that only this user may enter. Raises OSError if it cannot be made, or is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _delete_oldest(folder: Path) -> None:
    """Delete the oldest files of a folder until the others have at most `MOST_BYTES`."""
    by_age = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
    size = sum(file.stat().st_size for file in by_age)
    for file in by_age:
        if size <= MOST_BYTES:
            break
        size -= file.stat().st_size
        file.unlink(missing_ok=True)


def _count_programs(folder: Path) -> None:
    """Count the programs that are read and compiled from here on, and print both counts when the process ends."""
    counts: Counter[str] = Counter()

    def count(event: str, **_: str | int) -> None:
        counts[event] += 1

    def say() -> None:
        if counts[HIT] + counts[MISS]:
            print(f"{counts[HIT]} programs were read from {folder}, {counts[MISS]} were compiled", file=sys.stderr)

    jax.monitoring.register_event_listener(count)
    atexit.register(say)
