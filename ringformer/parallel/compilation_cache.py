"""Compiled programs, kept on disk by JAX's compilation cache: the second start of a command compiles nothing.

`train`, `generate` and `eval` keep them, for the devices that they run on. Programs for absent devices cannot be read
back (`estimate/workloads/targets.py`); those of simulated devices are read back wrongly before JAX 0.12
(`simulate_cpu_devices`).
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
"""Size of the folder, above which JAX deletes the programs that were not used for longest."""
HIT = "/jax/compilation_cache/cache_hits"
MISS = "/jax/compilation_cache/cache_misses"
"""JAX's events: a program was read from the cache, or was compiled and put there."""


def keep_programs() -> None:
    """Keep compiled programs in the user's cache, and say at the end of this process how many were read from it.

    The folder is $XDG_CACHE_HOME/ringformer/programs, or in ~/.cache. Only its owner may enter it, because its programs
    are executed. Call it after `simulate_cpu_devices`.
    """
    if VARIABLE in os.environ or not jax.config.values["jax_enable_compilation_cache"]:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringformer" / "programs"
    try:
        _make_private(folder)
    except OSError as error:
        print(f"compiled programs are not kept: {error}; {VARIABLE} names another folder", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    _count_programs(folder)


def _make_private(folder: Path) -> None:
    """Make a folder that only this user may enter. Raises OSError if it cannot be made, or is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _count_programs(folder: Path) -> None:
    """Count the programs that are read and compiled from here on, and print both counts when the process ends."""
    counts: Counter[str] = Counter()

    def count(event: str, **_: str | int) -> None:
        counts[event] += 1

    def say() -> None:
        if counts[HIT] + counts[MISS] and jax.process_index() == 0:
            print(f"{counts[HIT]} programs were read from {folder}, {counts[MISS]} were compiled", file=sys.stderr)

    jax.monitoring.register_event_listener(count)
    atexit.register(say)
